"""`python -m sar` is the command `sar`."""

from sar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

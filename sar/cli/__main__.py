"""`python -m sar.cli` is the same as the command `sar`."""

import sys

from sar.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Run a study again: `python -m benchmarks.studies NAME`, with `--help` for its options."""

from collections.abc import Sequence
from importlib import import_module

from benchmarks import command
from sar.errors import ConfigError

STUDIES = "averaging", "wire"


def main(argv: Sequence[str]) -> None:
    """Run the study that the first argument names."""
    if not argv or argv[0] not in STUDIES:
        raise ConfigError(f"no study {' '.join(argv[:1])!r}; expected one of {', '.join(STUDIES)}.")
    import_module(f"benchmarks.studies.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    command.run_main(main)

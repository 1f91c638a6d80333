"""Loads the function FILE.py:FUNCTION that creates a user's model, for `sar plan` and `sar infer`."""

import importlib.util
import sys
from inspect import signature
from pathlib import Path

from sar.errors import ConfigError
from sar.train.plan import MakeModel


def load_model(source: str, expected: str = "FILE.py:FUNCTION") -> MakeModel:
    """Load the function FILE.py:FUNCTION; `expected` is for the error if the text has another form."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name:
        raise ConfigError(f"--model {source}: expected {expected}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--model {source}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look up their module here
    sys.path.insert(0, str(path.absolute().parent))  # as for a script that is run
    spec.loader.exec_module(module)
    make_model: MakeModel | None = getattr(module, name, None)
    if not callable(make_model):
        raise ConfigError(f"--model {source}: {path} defines no function {name!r}.")
    try:
        signature(make_model).bind(None)
    except TypeError as error:
        raise ConfigError(f"--model {source}: {error}; expected a function with one argument, (info).") from None
    return make_model

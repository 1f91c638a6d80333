"""`sar.Config` refuses names and values that there are not, where they are set."""

import pydoc
import re

import pytest
import torch

import sar
from sar.config import _ACCEPTED, GlobalConfig
from sar.errors import ConfigError

WRONG = [
    ("comm_buffer_byte", 5, "did you mean comm_buffer_bytes?"),
    ("mode", 2, "expected one of disable_sr, pipeline_depth"),
    ("timeout", "x", "Config.timeout is 'x'; expected a positive number of seconds"),
    ("timeout", 0, "positive"),
    ("timeout", float("nan"), "positive"),
    ("comm_buffer_bytes", 0, "an integer of at least 1"),
    ("comm_buffer_bytes", 2.0**20, "an integer of at least 1"),
    ("pipeline_depth", True, "an integer of at least 0"),
    ("max_collective_size", -1, "an integer of at least 0"),
    ("disable_sr", "no", "True or False"),
    ("wire_dtype_gradients", torch.float32, "None or torch.bfloat16"),
    ("allocator", "most", "'least', 'kept' or 'system'"),
]


@pytest.mark.parametrize("name, value, words", WRONG, ids=[f"{name} {value}" for name, value, _ in WRONG])
def test_what_cannot_be_is_refused(name, value, words):
    before = getattr(sar.Config, name, None)
    with pytest.raises(ConfigError) as error:
        setattr(sar.Config, name, value)
    assert words in str(error.value)
    assert getattr(sar.Config, name, None) == before


def test_every_setting_is_checked_and_takes_its_default(monkeypatch):
    sar.Config.validate()
    for name in sar.Config.__annotations__:
        monkeypatch.setattr(sar.Config, name, getattr(sar.Config, name))
    monkeypatch.setattr(sar.Config, "timeout", 2)
    assert sar.Config.timeout == 2


def test_help_explains_every_setting():
    page = pydoc.plain(pydoc.render_doc(sar.Config))
    assert re.search(r"pipeline_depth \(an integer of at least 0; default 1\):\n \|\s+Tiles in flight while", page)
    explained = re.findall(r"^ \|      (\w+) \((.*); default (.*)\):\n \|          [A-Z]", page, re.MULTILINE)
    defaults = {name: getattr(GlobalConfig, name) for name in sar.Config.__annotations__}
    defaults["allocator"] = "auto"  # whatever the environment says
    assert explained == [(name, _ACCEPTED[name][1], repr(value)) for name, value in defaults.items()]

"""`sar.Config` refuses names and values that there are not, where they are set."""

import pydoc
import re

import sar
from sar.config import _ACCEPTED, GlobalConfig


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

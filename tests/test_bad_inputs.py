"""The catalogue of bad inputs: each is answered with an error of sar, word for word as `tests/bad_inputs` has it.

A message says what was found and what was expected, and how to mend it where that does not follow.
"""

import re

import pytest

from tests.bad_inputs import arguments, commands, directories, fields, set_up
from tests.core.attempts import catch

CALLS = {"fields": fields.CASES, "arguments": arguments.CASES}
COMMANDS = {"set_up": set_up.CASES, "commands": commands.CASES, "directories": directories.CASES}
LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def named(catalogue):
    return [(kind, name) for kind, cases in catalogue.items() for name in cases]


def check(failure, case):
    """`case.message` says "..." for anything."""
    assert failure is not None, "nothing was raised"
    assert re.fullmatch(re.escape(case.message).replace(re.escape("..."), ".*"), failure.message), failure.message
    assert failure.kind == case.error
    assert {"SarError", "Printed"} & set(failure.bases)


def call(kind, name):
    return catch(CALLS[kind][name].call)


@pytest.mark.parametrize("kind, name", named(CALLS))
@pytest.mark.parametrize("world_size", [1])
def test_a_bad_call(pool, kind, name):
    [failure] = pool.run(call, kind, name)
    check(failure, CALLS[kind][name])


@pytest.mark.parametrize("kind, name", named(COMMANDS))
def test_a_bad_setting_or_command(tmp_path, monkeypatch, kind, name):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    check(catch(COMMANDS[kind][name].call, tmp_path), COMMANDS[kind][name])


def test_messages_are_for_people():
    cases = [case for cases in (CALLS | COMMANDS).values() for case in cases.values()]
    assert len(cases) >= 60
    for case in cases:
        assert case.message[-1] in ".?"
        assert " object at 0x" not in case.message
        assert len(case.message) < 300

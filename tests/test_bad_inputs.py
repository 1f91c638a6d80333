"""The catalogue of bad inputs: each is answered with an error of sar that names the thing at fault."""

import pytest

from tests.bad_inputs import arguments, commands, directories, fields, set_up
from tests.core.attempts import catch

CALLS = {"fields": fields.CASES, "arguments": arguments.CASES}
COMMANDS = {"set_up": set_up.CASES, "commands": commands.CASES, "directories": directories.CASES}
LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def named(catalogue):
    return [(kind, name) for kind, cases in catalogue.items() for name in cases]


def check(failure, case):
    assert failure is not None, "nothing was raised"
    assert case.words in failure.message
    assert failure.kind == case.error
    assert failure.message[-1] in ".?"
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

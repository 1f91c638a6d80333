"""The catalogue of bad inputs: each is answered with an error of sar that names the thing at fault."""

import pytest

from tests.bad_inputs import arguments, commands, directories, fields, set_up
from tests.core.attempts import catch

LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def cases(*files):
    """What `check` compares, and the file."""
    return [(words, kind, file) for file in files for kind, calls in file.CASES.items() for words in calls]


def check(failure, words, kind):
    assert failure is not None, "nothing was raised"
    assert words in failure.message
    assert failure.kind == kind
    assert failure.message[-1] in ".?"
    assert {"SarError", "Printed"} & set(failure.bases)


def call(file, kind, words):
    return catch({"fields": fields, "arguments": arguments}[file].CASES[kind][words])


@pytest.mark.parametrize("words, kind, file", cases(fields, arguments))
@pytest.mark.parametrize("world_size", [1])
def test_a_bad_call(pool, words, kind, file):
    [failure] = pool.run(call, file.__name__.rpartition(".")[2], kind, words)
    check(failure, words, kind)


@pytest.mark.parametrize("words, kind, file", cases(set_up, commands, directories))
def test_a_bad_setting_or_command(tmp_path, monkeypatch, words, kind, file):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    check(catch(file.CASES[kind][words], tmp_path), words, kind)

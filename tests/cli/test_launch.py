"""`sar launch`: what its workers get, what it passes on, and that nothing outlives it."""

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sar.cli import launch as command
from sar.cli import main
from sar.cli.arguments import COMMANDS
from sar.comm.allocator import preloads
from sar.errors import ConfigError
from tests.leftovers import marked_processes
from tests.python_process import PythonProcess
from tests.workers import ensure_fork_server

VARIABLES = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "SAR_ALLOCATOR"

SCRIPT = f"""
import json, os, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
variables = {{name: os.environ.get(name) for name in {VARIABLES}}}
said = dict(rank=rank, size=size, arguments=sys.argv[1:], variables=variables)
os.write(1, (json.dumps(said) + "\\n").encode())  # one write, as the workers share a pipe
how = sys.argv[1]
if how == "exit" and rank == 1:
    sys.exit(7)
if how == "killed" and rank == size - 1:
    os.kill(os.getpid(), 9)
if how != "succeed":
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The script to launch, where none of the variables is set; afterwards no process and no temporary file is left."""
    file, temporary = tmp_path / "train.py", tmp_path / "temporary"
    file.write_text(SCRIPT)
    temporary.mkdir()
    ensure_fork_server()  # which stays
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in (*VARIABLES, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    before = set(marked_processes())
    yield file
    assert set(marked_processes()) <= before
    assert list(temporary.iterdir()) == []


def launch(*arguments: object) -> PythonProcess:
    return PythonProcess("-m", "sar.cli", "launch", *arguments)


def reports(output: str) -> list[dict[str, Any]]:
    """What the workers said, by rank."""
    return sorted(map(json.loads, output.splitlines()), key=lambda report: report["rank"])


def partition_json(folder: Path, parts: int) -> Path:
    """The JSON file of a partition directory that is not there."""
    ranges = {"_N": [[p, p + 1] for p in range(parts)]}
    file = folder / "graph.json"
    types = {"ntypes": {"_N": 0}, "etypes": {"_N:_E:_N": 0}}
    content = types | {"num_parts": parts, "node_map": ranges, "edge_map": {"_N:_E:_N": ranges["_N"]}}
    file.write_text(json.dumps(content | {f"part-{p}": {} for p in range(parts)}))
    return file


def test_each_partition_gets_a_worker_and_each_worker_its_settings(script: Path, tmp_path: Path) -> None:
    # The script's own, some of which begin as options of `sar launch` or of torchrun do.
    arguments = ["succeed", "--workers", "5", "--help", "--log", "x", "--m", "--w", "3", "--node-rank", "7", "--", "-m"]
    process = launch("--partition-json", partition_json(tmp_path, 2), script, *arguments)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    variables = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)), "GLOO_SOCKET_IFNAME": "lo"}
    expected = {"size": 2, "arguments": arguments, "variables": variables | {"SAR_ALLOCATOR": None}}
    assert reports(output) == [{"rank": rank, **expected} for rank in range(2)]
    said = " ".join(f"{name}={value}" for name, value in (variables | preloads()).items())
    assert errors == f"sar launch: 2 workers; {said}; given to the script: --workers\n"


@pytest.mark.parametrize(
    "options, parts, expected", [([], 2, 2), ([], 1000, len(os.sched_getaffinity(0))), (["--workers", "3"], 2, 3)]
)
def test_how_many_workers(tmp_path: Path, options: list[str], parts: int, expected: int) -> None:
    arguments = parsed(*options, "--partition-json", str(partition_json(tmp_path, parts)), "train.py")
    assert command._number_of_workers(arguments) == expected


@pytest.mark.parametrize("named", ["--data={}", "{}"])
def test_partitions_are_found_among_the_scripts_arguments(script: Path, tmp_path: Path, named: str) -> None:
    (tmp_path / "parts").mkdir()
    file = partition_json(tmp_path / "parts", 2)
    given = named.format(file if "=" in named else file.parent)
    process = launch(script, "succeed", "nowhere.json", tmp_path, "--empty=", given, "--lr", "0.1")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [report["size"] for report in reports(output)] == [2, 2]
    assert errors.startswith("sar launch: 2 workers; ")


@pytest.mark.parametrize(
    ("words", "environment", "loaded"),
    [
        ([], {}, True),
        (["--allocator", "mimalloc"], {"SAR_ALLOCATOR": "kept"}, True),
        (["--allocator", "least"], {}, False),
        (["--resident", "1", "--spill", "."], {"SAR_PARTS": "4"}, False),
        ([], {"SAR_ALLOCATOR": "kept"}, False),
        ([], {"LD_PRELOAD": ""}, False),
        ([], {"SAR_RESIDENT": "1"}, False),
        ([], {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, False),
    ],
)
def test_mimalloc_is_loaded_unless_something_else_is_chosen(
    script: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str], loaded: bool
) -> None:
    monkeypatch.setattr(command, "preloads", lambda: {"LD_PRELOAD": "mimalloc.so"})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command._settings(parsed(*words, str(script)), 1).get("LD_PRELOAD") == ("mimalloc.so" if loaded else None)


def test_a_budget_and_the_folder_of_the_partitions(tmp_path: Path) -> None:
    arguments = parsed("--memory", "1GiB", "train.py", f"--data={partition_json(tmp_path, 3).parent}")
    settings = command._settings(arguments, command._number_of_workers(arguments))
    expected = {"SAR_MEMORY": f"{2**30}B", "SAR_RESIDENT": "1", "SAR_PARTS": "3", "SAR_SPILL_DIR": str(tmp_path)}
    assert expected.items() <= settings.items()
    assert "SAR_ALLOCATOR" not in settings


def test_mimalloc_that_is_not_installed(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "preloads", dict)
    monkeypatch.setenv("XDG_CACHE_HOME", str(script.parent / "cache"))
    hints = []
    for _ in range(2):
        assert "LD_PRELOAD" not in command._settings(parsed(str(script)), 1)
        hints.append("pip install cmeel-mimalloc" in capsys.readouterr().err)
    assert hints == [True, False]
    with pytest.raises(ConfigError, match="pip install cmeel-mimalloc"):
        command._settings(parsed("--allocator", "mimalloc", str(script)), 1)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMANDS["launch"][0](parser)
    return parser.parse_args(words)


def test_workers_start_again_after_a_failure(script: Path, tmp_path: Path) -> None:
    script.write_text(f"import os\nopen(r'{tmp_path / 'starts'}', 'a').write('x')\nos._exit(3)\n")
    process = launch("--max-restarts", "2", script)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert (tmp_path / "starts").read_text() == "xxx"


def test_an_unknown_option_shows_the_commands_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--nope", "train.py"])
    error = capsys.readouterr().err
    assert error.startswith("usage: sar launch")
    assert "unrecognized arguments: --nope" in error


def test_what_the_user_sets_wins(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "3")
    process = launch("--threads", 4, script, "succeed")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    [report] = reports(output)
    assert report["variables"] == dict.fromkeys(VARIABLES, "3") | {"OMP_NUM_THREADS": "4"}
    assert errors == "sar launch: 1 worker; OMP_NUM_THREADS=4\n"


@pytest.mark.parametrize(
    ("workers", "how", "status"),
    [(2, "exit", 7), (2, "killed", 128 + signal.SIGKILL), (1, "killed", 128 + signal.SIGKILL)],
)
def test_the_exit_status_of_a_worker_passes_through_and_the_others_end(
    script: Path, workers: int, how: str, status: int
) -> None:
    process = launch("--workers", workers, script, how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert ("a worker was killed (signal 9)" in errors) == (how == "killed")


NOTING = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: sys.exit(0) if sys.argv[1] == "ends" else None)
os.write(1, b"ready\\n")
time.sleep(100)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("how, grace, killed", [("ends", 60, False), ("stays", 0.5, True)])
def test_a_signal_is_handed_on(script: Path, number: signal.Signals, how: str, grace: float, killed: bool) -> None:
    script.write_text(NOTING)
    process = launch("--workers", 2, "--max-restarts", 1, "--grace", grace, script, how)
    assert [process.line(), process.line()] == ["ready\n", "ready\n"]
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert output == ""  # it is not started again
    assert process.returncode == (128 + number if killed else 0), errors
    assert ("killing workers that have not ended 0.5 s after SIG" in errors) is killed


def test_workers_that_do_not_ask_end_by_the_signal(script: Path) -> None:
    process = launch("--workers", 2, "--max-restarts", 1, script, "wait")
    assert reports(process.line() + process.line())[1]["rank"] == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_an_interrupt_ends_all(script: Path) -> None:
    process = launch("--workers", 2, script, "wait")
    assert reports(process.line() + process.line())[1]["rank"] == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT

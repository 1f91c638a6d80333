"""What `sar` prints if a command cannot go on: one line, and a status that scripts can ask for."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sar.cli import inspect, main


def raising(monkeypatch: pytest.MonkeyPatch, action) -> None:
    monkeypatch.setattr(inspect, "run", lambda arguments: action())


def raise_(error: BaseException) -> None:
    raise error


def test_ctrl_c_prints_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, lambda: raise_(KeyboardInterrupt()))
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "sar inspect: interrupted\n"


def test_sigterm_cleans_up_and_ends_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)

    raising(monkeypatch, wait)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "x"])
    assert (ended.value.code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EMFILE])
def test_errors_of_the_file_system_name_the_file(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, lambda: raise_(OSError(number, os.strerror(number), "there/x")))
    assert main(["inspect", "x"]) == 1
    assert capsys.readouterr().err == f"sar inspect: {os.strerror(number)}: there/x\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, lambda: raise_(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        main(["inspect", "x"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "x"], "argument --parts: 'x' is not a number of parts; expected a number, such as 4, or auto"),
        (["--parts", "-1"], "argument --parts: '-1' is not a number of parts; expected a number, such as 4, or auto"),
        (["--split", "1,x"], "argument --split: '1,x' is no list of fractions such as 0.6,0.2,0.2"),
    ],
)
def test_options_of_another_form(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["partition", "edges.csv", "--parts", "2", *arguments])
    assert capsys.readouterr().err.splitlines()[-1] == f"sar partition: error: {told}"


def ended(to: int, environment: dict[str, str], names: str) -> tuple[int, str]:
    """The exit status and errors of a command that prints to a file descriptor."""
    script = (
        f"import sys; from sar.cli import inspect, main; inspect.run = lambda _: print({names!r}); sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "inspect", "x"]
    done = subprocess.run(
        command, stdout=to, stderr=subprocess.PIPE, env=os.environ | environment, timeout=60, check=False
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("buffered", ["", "1"])
def test_the_reader_of_a_pipe_has_left(buffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    assert ended(writes, {"PYTHONUNBUFFERED": buffered}, "x") == (128 + signal.SIGPIPE, "")
    os.close(writes)


def test_the_output_goes_to_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        told = "sar: the output cannot be written (No space left on device)\n"
        assert ended(full.fileno(), {"PYTHONUNBUFFERED": ""}, "x") == (1, told)


def test_characters_that_the_terminal_lacks(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as file:
        assert ended(file.fileno(), {"PYTHONIOENCODING": "ascii"}, "zo\xeb b\udcff") == (0, "")
        assert ended(file.fileno(), {"PYTHONIOENCODING": "utf-8"}, "zo\xeb b\udcff") == (0, "")
    assert (tmp_path / "out").read_bytes() == b"zo\\xeb b\\udcff\nzo\xc3\xab b\\udcff\n"

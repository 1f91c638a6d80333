"""What `sar` prints if a command cannot go on: one line, and a status that scripts can ask for."""

import errno
import os
import signal
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


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOTDIR])
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


def test_a_directory_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges, file = tmp_path / "edges.csv", tmp_path / "file"
    edges.write_text("0,1\n1,2\n")
    file.touch()
    assert main(["partition", str(edges), "--parts", "1", "--out", str(file / "out")]) == 1
    told = f"sar partition: '{file}/out.partial' cannot be made (Not a directory); name a directory elsewhere."
    assert capsys.readouterr().err.splitlines()[-1] == told

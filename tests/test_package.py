"""What a package index and its users get: the wheel and the sdist, made from a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import sar
from sar.cli import main
from tests.workers import REPOSITORY


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, so that nothing is written there, and nothing that lies about is taken along."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode:
        pytest.skip("packages are made from a git repository")
    folder = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    return folder


def run(*arguments: str, cwd: Path | None = None, path: Path | None = None) -> str:
    """What Python prints, run with `path` as the only place beside its own where packages are."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | ({"PYTHONPATH": str(path)} if path else {}),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    [wheel] = built.glob("sar_gnn-*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name))


@pytest.fixture(scope="module")
def site(metadata: Message) -> str:
    """The address of the documentation, which pyproject.toml has."""
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    return urls["Documentation"]


def test_the_index_takes_it(built: Path) -> None:
    said = run("-m", "twine", "check", "--strict", *map(str, built.iterdir()))
    assert said.count("PASSED") == 2


def test_names_and_version(metadata: Message, capsys: pytest.CaptureFixture[str]) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("sar-gnn", sar.__version__)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"sar {sar.__version__}\n"


def test_links_of_the_readme_work_outside_the_repository(metadata: Message, site: str) -> None:
    page = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert [target for target in targets if not re.match(r"https://|#", target)] == []
    assert f"{site}scale.png" in targets
    linked = [target[len(site) :].partition("#")[0] for target in targets if target.startswith(site)]
    pages = [REPOSITORY / "docs" / name.replace(".html", ".md") for name in linked if name.endswith(".html")]
    of_the_root = {"contributing.md", "security.md", "changes.md"}
    of_the_root |= {page.name for page in pages if "examples" in page.parts}
    assert len(pages) > 20
    assert [page for page in pages if not page.exists() and page.name not in of_the_root] == []
    assert not re.search(r"<(img|a) ", page)  # these would have links too


def test_the_sdist_has_what_the_tests_need(built: Path, source: Path) -> None:
    [sdist] = built.glob("sar_gnn-*.tar.gz")
    with tarfile.open(sdist) as files:
        inside = {Path(*Path(name).parts[1:]) for name in files.getnames()}
    assert {file.relative_to(source) for file in source.rglob("*") if file.is_file()} - inside == set()


def test_the_wheel_has_the_package_alone(built: Path, source: Path) -> None:
    [wheel] = built.glob("sar_gnn-*.whl")
    with zipfile.ZipFile(wheel) as files:
        inside = {Path(name) for name in files.namelist() if ".dist-info/" not in name}
    expected = {file.relative_to(source) for file in (source / "sar").rglob("*") if file.is_file()}
    assert inside == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_of_the_installed_wheel(built: Path, tmp_path: Path) -> None:
    """In a folder that has nothing of the repository; the kernels are compiled there."""
    [wheel] = built.glob("sar_gnn-*.whl")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "here"), str(wheel))
    sar_command, place = str(tmp_path / "here" / "bin" / "sar"), {"cwd": tmp_path, "path": tmp_path / "here"}
    assert run("-c", "import sar; print(sar.__file__)", **place) == f"{tmp_path}/here/sar/__init__.py\n"
    assert run(sar_command, "--version", **place) == f"sar {sar.__version__}\n"
    assert "partition" in run("-m", "sar", "--help", **place)
    (tmp_path / "edges.csv").write_text("".join(f"{n % 37},{n * n % 41}\n" for n in range(500)))
    run(sar_command, "partition", "edges.csv", "--parts", "2", "--out", "parts", **place)
    assert "sound" in run(sar_command, "inspect", "parts", **place)
    run(sar_command, "demo", "--nodes", "400", "--degree", "4", "--epochs", "2", **place)
    assert (tmp_path / "demo" / "demo.png").exists()

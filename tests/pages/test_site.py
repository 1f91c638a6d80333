"""The pages: the API reference names everything public, links have a form, each page begins with what it is for."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import sar
from tests.pages.blocks import PAGES
from tests.workers import REPOSITORY

API = REPOSITORY / "docs" / "api"
PACKAGES = ("sar", "sar.comm", "sar.nn", "sar.train", "sar.sampling", "sar.pyg")
"""Public import paths that say in `__all__` what they offer."""

NOT_OURS = {
    "RelGraphConv": "DGL's",
    "logger": "the logger of Python's logging, named sar",
    "HeteroGraphShardManager": "another name of GraphShardManager",
}


def documented() -> dict[str, str]:
    """The full path of everything in the API reference, by its last name."""
    paths = re.findall(r"^::: ([\w.]+)$", "".join(page.read_text() for page in API.glob("*.md")), re.MULTILINE)
    assert len(paths) == len(set(paths))
    return {path.rpartition(".")[2]: path for path in paths}


def test_the_reference_names_everything_public() -> None:
    public = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    public |= {name for name, value in vars(sar.errors).items() if isinstance(value, type)}
    modules = {name for name in public if type(getattr(sar, name, None)) is type(sar)}
    assert sorted(public - modules - set(NOT_OURS) - set(documented())) == []


def test_what_the_reference_names_is_there() -> None:
    for path in documented().values():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_begin_with_what_they_are_for(page: Path) -> None:
    """A title, then a paragraph of prose: no list, table, block or second title."""
    lines = [line for line in re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).splitlines() if line.strip()]
    assert re.match(r"# \S", lines[0])
    assert re.match(r"[\w`\"*\[]", lines[1]), lines[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_elsewhere_have_the_form_of_links(page: Path) -> None:
    """They are not followed, as tests do not depend on others' servers. `make docs` checks those within the site."""
    for link in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+://[^>]*)>", page.read_text()):
        parts = urlsplit(link[0] or link[1])
        assert parts.scheme == "https", link
        assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link


def test_a_test_that_a_page_names_is_in_its_file() -> None:
    named = [
        (name, (page.parent / file).resolve())
        for page in PAGES
        for name, file in re.findall(r"\[`(test_\w+)`\]\(([^)]+\.py)\)", page.read_text())
    ]
    promises = (REPOSITORY / "docs" / "promises.md").read_text()
    assert promises.count("[`test_") == promises.count("\n| ") - 2 <= len(named), "a promise without a test"
    assert [name for name, file in named if not file.exists() or f"def {name}(" not in file.read_text()] == []


def test_the_pages_stay_short() -> None:
    """A page that grows says something twice, or another page can lose as much."""
    words = sum(len(page.read_text().split()) for page in PAGES if page.name != "CONTRIBUTING.md")
    assert words <= 32_000


def test_commands_in_sentences_and_tables_are_there() -> None:
    """Those that no test can run: `make` anything, and the benchmarks."""
    text = "".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(?:\w+=\S+ )?make ([\w-]+)", text)) <= targets
    modules = set(re.findall(r"python -m (benchmarks(?:\.\w+)?)", text))
    assert len(modules) > 5
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """Broken links, pages that the navigation lacks and docstrings that cannot be read are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=200, check=True)

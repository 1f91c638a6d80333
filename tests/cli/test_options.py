"""Every option of the commands has an example in the documentation and occurs in a test; every example is parsed."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sar.cli.arguments import COMMANDS, FORMATS, METHODS
from sar.partition.assign import assigning
from sar.partition.ingest import sources
from tests.workers import REPOSITORY


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    COMMANDS[command][0](parser)
    return parser


def options_of(command: str) -> set[str]:
    """The long names of its options, without those that turn one off again."""
    return {action.option_strings[0] for action in parser_of(command)._actions if action.option_strings} - {"-h"}


def examples() -> Iterator[tuple[str, list[str]]]:
    """Each command line of `sar` in the documentation: the command, and its arguments."""
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:^|-m )sar(?:\.cli)? ([\w-]+)(.*)", line)
                if found and found[1] in COMMANDS:
                    yield found[1], shlex.split(re.sub(r"\s#.*", "", found[2]))


def test_names_are_those_of_the_modules_that_are_not_imported() -> None:
    assert tuple(assigning.METHODS) == METHODS
    assert FORMATS == sources.FORMATS
    defaults = parser_of("partition").parse_args(["x", "--parts", "2"])
    assert (defaults.method, assigning.IN_EDGES) == (assigning.MULTILEVEL, "in_edges")
    assert f"({assigning.VOLUME_BOUND})" in parser_of("partition").format_help()


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"demo"}))
def test_examples_can_be_parsed(command: str) -> None:
    lines = [arguments for name, arguments in examples() if name == command]
    assert lines
    for arguments in lines:
        if "..." not in arguments:
            parser_of(command).parse_args(arguments)


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"demo"}))
def test_every_option_has_an_example_and_a_test(command: str) -> None:
    options = options_of(command)
    both = options_of("partition") & options_of("chunk")  # what they read is said once
    if command == "chunk":
        options -= both
    exemplified = {word for name, arguments in examples() if name == command for word in arguments}
    assert sorted(options - exemplified) == []
    texts = [file.read_text() for file in (REPOSITORY / "tests").rglob("*.py") if file != Path(__file__)]
    running = "\n".join(text for text in texts if re.search(rf"[\"' ]{command}[\"' ]", text))
    assert sorted(option for option in options if not re.search(rf"{option}(?![\w-])", running)) == []

"""Which file of the repository is which page of the site, for MkDocs (site_hooks.py) and package indexes (setup.py)."""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository that are pages, by their names on the site."""

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def relink(markdown: str, origin: str, address: Callable[[str], str]) -> str:
    """Point links to files of the repository at the site; of those to code that it does not have, the text stays.

    Args:
        markdown: text with links relative to `origin`, a path in the repository.
        address: gives a page, `memory.md`, as the text shall name it.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        page = _on_site(target)
        if page is None:
            return match["text"] if (REPOSITORY / target).exists() else match[0]  # what is nowhere is told by MkDocs
        return f"[{match['text']}]({address(page)}{match['anchor'] or ''})"

    return _LINK.sub(link, markdown)


def _on_site(path: str) -> str | None:
    """Where the site has a file of the repository; None for code other than the examples."""
    if path in PAGES:
        return PAGES[path]
    if re.fullmatch(r"examples/\w+\.(py|ipynb)", path):
        return f"{path.rpartition('.')[0]}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None

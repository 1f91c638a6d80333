"""What MkDocs does to the pages of docs/ while `make docs` builds the site.

README, CHANGELOG, CONTRIBUTING and SECURITY lie where GitHub and package indexes look for them, and are pages of the
site too, and so are the scripts in examples/, which pages link to. The comments that tell tests how blocks are run go.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository that are pages, by their names on the site."""

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_COMMENT = re.compile(r"^(?P<fence>[ ]*`{3,}).*?^(?P=fence)[ ]*$|^[ ]*<!--\ test:.*?-->\n?", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files elsewhere."""
    made = {page: (REPOSITORY / name).read_text() for name, page in PAGES.items()}
    for script in sorted((REPOSITORY / "examples").glob("*.py")):
        made[f"examples/{script.stem}.md"] = f"# {script.name}\n\n```python\n{script.read_text()}```\n"
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the comments for tests, and point links at pages of the site."""
    origin = {new: old for old, new in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        there = _on_site(target)
        if there is None:
            return match["text"] if (REPOSITORY / target).exists() else match[0]  # what is nowhere is told by MkDocs
        path = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match['text']}]({path}{match['anchor'] or ''})"

    markdown = _COMMENT.sub(lambda match: match[0] if match["fence"] else "", markdown)
    return _LINK.sub(link, markdown)


def _on_site(path: str) -> str | None:
    """Where the site has a file of the repository; None for code other than the examples."""
    if path in PAGES:
        return PAGES[path]
    if re.fullmatch(r"examples/\w+\.py", path):
        return f"{path.removesuffix('.py')}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None

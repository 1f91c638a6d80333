"""What MkDocs does to the pages of docs/ while `make docs` builds the site.

README, CHANGELOG, CONTRIBUTING and SECURITY lie where GitHub and package indexes look for them, and are pages of the
site too, and so are the scripts in examples/, which pages link to. The comments that tell tests how blocks are run go.
"""

import json
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import PAGES, REPOSITORY, relink

_COMMENT = re.compile(r"^(?P<fence>[ ]*`{3,}).*?^(?P=fence)[ ]*$|^[ ]*<!--\ test:.*?-->\n?", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files elsewhere."""
    made = {page: (REPOSITORY / name).read_text() for name, page in PAGES.items()}
    for script in sorted((REPOSITORY / "examples").glob("*.py")):
        made[f"examples/{script.stem}.md"] = f"# {script.name}\n\n```python\n{script.read_text()}```\n"
    for notebook in (REPOSITORY / "examples").glob("*.ipynb"):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_text())["cells"]]
        texts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
        made[f"examples/{notebook.stem}.md"] = "\n\n".join(texts)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the comments for tests, and point links at pages of the site."""
    origin = {new: old for old, new in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    markdown = _COMMENT.sub(lambda match: match[0] if match["fence"] else "", markdown)
    here = posixpath.dirname(page.file.src_uri) or "."
    return relink(markdown, origin, lambda target: posixpath.relpath(target, here))

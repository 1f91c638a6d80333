"""What MkDocs does to the pages of docs/ while `make docs` builds the site.

README, CHANGELOG, CONTRIBUTING and SECURITY lie where GitHub and package indexes look for them, and are pages of the
site too, and so is what lies in examples/, which pages link to. The comments that tell tests how blocks are run go.
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
    for file in sorted((REPOSITORY / "examples").glob("*.*")):
        content = file.read_text()
        if file.suffix == ".ipynb":
            cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(content)["cells"]]
            text = "\n\n".join(code if kind == "markdown" else f"```python\n{code}\n```" for kind, code in cells)
        else:
            text = f"# {file.name}\n\n```python\n{content}```"
        made[f"examples/{file.stem}.md"] = f"{text}\n\n[Download]({file.name})\n"
        made[f"examples/{file.name}"] = content
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the comments for tests, and point links at pages of the site."""
    origin = {new: old for old, new in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = _COMMENT.sub(lambda match: match[0] if match["fence"] else "", markdown)
    here = posixpath.dirname(page.file.src_uri) or "."
    return relink(markdown, origin, lambda target: posixpath.relpath(target, here))

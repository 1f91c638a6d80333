"""Every page of the site in a real browser, as wide as a desktop and as a phone; SAR_SCREENSHOTS=DIR keeps pictures."""

import http.server
import os
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

CHROMIUM = shutil.which("chromium")
WIDTHS = {"desktop": 1280, "phone": 390}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]

WIDER = """() => [...document.querySelectorAll('.md-content *')]
    .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
    .filter(e => !e.closest('.md-typeset__scrollwrap, pre, .highlight, code'))
    .map(e => e.outerHTML.slice(0, 120))"""
"""What reaches beyond the window, and cannot be scrolled by itself."""

BROKEN = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The site, built, and where it is served."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=120,
        check=True,
    )
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("kind", WIDTHS)
def test_every_page(site: tuple[Path, str], browser, kind: str) -> None:
    folder, address = site
    faults = []
    keep = os.environ.get("SAR_SCREENSHOTS")
    with browser.new_context(viewport={"width": WIDTHS[kind], "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and faults.append(f"{page.url}: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
        page.on("request", lambda sent: sent.url.startswith(address) or faults.append(f"{page.url} loads {sent.url}"))
        for file in sorted(folder.rglob("*.html")):
            name = file.relative_to(folder)
            page.goto(f"{address}/{name}", wait_until="load", timeout=30_000)
            faults += [f"{name}: no picture at {source}" for source in page.evaluate(BROKEN)]
            if page.evaluate("() => document.documentElement.scrollWidth > window.innerWidth"):
                faults.append(f"{name}: the page is wider than the window")
            faults += [f"{name}: wider than the window: {element}" for element in page.evaluate(WIDER)]
            if keep:
                page.screenshot(path=Path(keep) / kind / f"{'-'.join(name.with_suffix('').parts)}.png", full_page=True)
    assert faults == []

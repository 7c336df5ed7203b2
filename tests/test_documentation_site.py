"""The documentation site: it lists every page, loads nothing from other hosts, and its search runs from a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.report.chromium import browser_path, running_browser

ROOT = Path(__file__).parent.parent
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
STAND_IN = ROOT / "docs" / "javascripts" / "iframe-worker.js"


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = re.findall(r": ([\w/-]+\.md)$", SITE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_the_site_names_no_other_host() -> None:
    assert "https:" not in SITE
    assert f"polyfills: [{STAND_IN.relative_to(ROOT / 'docs')}]" in SITE


@pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed (apt-get install chromium)")
def test_what_stands_in_for_a_worker_answers_from_a_file(tmp_path: Path) -> None:
    worker = 'addEventListener("message", async ({ data }) => postMessage({ doubled: 2 * data.number }));'
    (tmp_path / "worker.js").write_text(worker, encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>x</title><script>{STAND_IN.read_text(encoding='utf-8')}</script><body>")
    path = browser_path()
    assert path is not None
    with running_browser(path, tmp_path / "browser") as tab:
        tab.open(page.as_uri())
        answer = tab.evaluate(
            "new Promise((resolve) => { const worker = new Worker('worker.js');"
            " worker.addEventListener('message', ({ data }) => resolve(data.doubled));"
            " worker.postMessage({ number: 21 }); })"
        )
        assert answer == 42
        assert tab.problems == []

"""The distribution: its description on a package index, the Pythons that it is for, and where make gets torch from."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELATIVE = re.compile(r"\]\((?!https?://)[^)]*\)")
RELATIVE_HTML = re.compile(r"(?:src|href)=\"(?!https?://)")


def description(config: dict[str, Any]) -> str:
    """Return the README as the distribution's metadata has it."""
    return str(ProjectMetadata(str(ROOT), PluginManager(), config).core.readme)


def configured(**project: Any) -> dict[str, Any]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config["project"].update(project)
    return config


def test_the_description_on_a_package_index_has_no_link_that_leads_nowhere() -> None:
    text = description(configured())
    assert not RELATIVE.search(text)
    assert not RELATIVE_HTML.search(text)
    # Words stay where links went, code and results stay as they are.
    assert "Start here" in text
    assert "memfit.fit(" in text
    assert "checkpoint every block" in text


def test_with_an_address_of_the_repository_links_and_images_lead_there() -> None:
    text = description(configured(urls={"Repository": "https://example.org/memfit"}))
    assert not RELATIVE.search(text)
    assert "](https://example.org/memfit/raw/main/docs/images/page.png)" in text
    assert "[Start here](https://example.org/memfit/blob/main/docs/start.md)" in text


def test_the_classifiers_name_every_python_from_the_oldest_that_is_allowed() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert named == [f"3.{minor}" for minor in range(11, 15)]
    assert f"3.{sys.version_info.minor}" in named


class Index(http.server.BaseHTTPRequestHandler):
    """An index that has one project."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def commands_of(*arguments: str) -> str:
    """Return what make would run for the demo in a fresh clone."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", f"PYTHON={sys.executable}", "VENV=fresh"]
    run = functools.partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, text=True)
    return str(run([*command, *arguments, "demo"]).stdout)


def test_make_adds_the_index_with_cpu_builds_of_torch_where_it_answers(index: str) -> None:
    assert f"--extra-index-url {index}/whl " in commands_of(f"TORCH_INDEX={index}/whl")
    assert "--extra-index-url" not in commands_of(f"TORCH_INDEX={index}/elsewhere")
    assert "--extra-index-url" not in commands_of("TORCH_INDEX=")
    assert "TORCH_INDEX ?= https://download.pytorch.org/whl/cpu\n" in (ROOT / "Makefile").read_text(encoding="utf-8")

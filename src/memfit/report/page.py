"""``write_page``: a report as one HTML file that needs nothing else, neither the network nor a library.

The file holds the data as JSON and the scripts and styles of ``page_assets``. Names of modules are the user's: they
reach the page as JSON and as text nodes alone, never as markup.
"""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from typing import Any

from memfit.documents import write_text
from memfit.report.page_data import ReportData
from memfit.report.page_document import page_document

_SCRIPTS = ("words.js", "shapes.js", "curve.js", "blocks.js", "timeline.js", "values.js", "sizes.js", "main.js")
# Within a script element these would begin or end markup, whatever the type of the script.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_page(path: str | os.PathLike[str], data: ReportData) -> None:
    """Write the page to ``path`` in one go; a path that cannot be written is a ``PlanFileError``."""
    write_text(path, page_text(data))


def page_text(data: ReportData) -> str:
    """Return the HTML of the page."""
    fields = {
        "title": html.escape(data.title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": _asset("style.css"),
        "data": _embedded_json(page_document(data)),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
    }
    # One piece at a time: what is put in may itself look like a place to fill.
    text = []
    for number, piece in enumerate(_asset("page.html").split("@@")):
        text.append(fields[piece] if number % 2 else piece)
    return "".join(text)


def _embedded_json(document: dict[str, Any]) -> str:
    # Escaping all that is not ASCII also covers lone surrogates, which could not be written as UTF-8.
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return resources.files("memfit.report").joinpath("page_assets", name).read_text(encoding="utf-8")

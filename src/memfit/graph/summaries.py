"""Short summaries: the text of ``repr()`` and the table that notebooks show."""

from __future__ import annotations

import html
from collections.abc import Mapping


def text_summary(title: str, lines: Mapping[str, str]) -> str:
    """Return ``title`` and one indented line for each of ``lines``, with the names aligned."""
    width = max(map(len, lines), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {words}" for name, words in lines.items())])


def html_summary(title: str, lines: Mapping[str, str]) -> str:
    """Return the same as an HTML table."""
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in lines.items())
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"

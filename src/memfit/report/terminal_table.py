"""A table for terminals of any width: no number is cut, and where the columns do not fit, rows become short lists."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

# What the box and the padding take beside each column.
_GAP = 3
# A column of names may shrink to this, or to its longest word.
_NARROWEST_NAME = 12


class TerminalTable(Table):
    """A table whose first column has names, which may wrap or shrink, and whose other columns are shown whole."""

    def __init__(self, title: str) -> None:
        super().__init__(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=True)

    def add_numbers(self, *headings: str) -> None:
        """Add a column of numbers for each heading."""
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = [_least_width(column) for column in self.columns]
        spare = options.max_width - 1 - sum(width + _GAP for width in least)
        if spare >= 0:
            # Left to right, a column that may wrap takes what is left up to what it needs for one line.
            for column, width in zip(self.columns, least, strict=True):
                extra = min(spare, max(0, _full_width(column) - width))
                column.width = width + extra
                spare -= extra
            yield from super().__rich_console__(console, options)
            return
        assert self.title is not None
        yield self.title
        first, *others = self.columns
        rows = zip_longest(first.cells, *(column.cells for column in others), fillvalue="")
        for name, *cells in rows:
            yield Text()
            yield Padding(_text(name), (0, 0, 0, 1))
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="dim")
            grid.add_column()
            for column, cell in zip(others, cells, strict=True):
                if _text(cell).plain:
                    grid.add_row(_heading(column), cell)
            yield Padding(grid, (0, 0, 0, 3))
        if self.caption is not None:
            yield self.caption
        yield Text()


def summary_grid(lines: Mapping[str, str | Text]) -> Padding:
    """Return a line for each entry: its name in bold, then the words."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, words in lines.items():
        grid.add_row(name, words if isinstance(words, Text) else Text(words))
    return Padding(grid, (0, 0, 0, 1))


def _least_width(column: Column) -> int:
    """Return how narrow the column may become before a number or a word of it is cut."""
    texts = [_text(column.header), *map(_text, column.cells)]
    if column.no_wrap:
        return _full_width(column)
    longest_word = max((len(word) for text in texts for word in text.plain.split()), default=0)
    return min(longest_word, _NARROWEST_NAME) if column.overflow == "ellipsis" else longest_word


def _full_width(column: Column) -> int:
    """Return how wide the column is where nothing wraps."""
    texts = [_text(column.header), *map(_text, column.cells)]
    return max((len(line) for text in texts for line in text.plain.splitlines()), default=0)


def _heading(column: Column) -> str:
    return " ".join(_text(column.header).plain.split())


def _text(content: object) -> Text:
    return content if isinstance(content, Text) else Text.from_markup(str(content))

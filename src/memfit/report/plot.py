"""``write_plot``: the trade-off as a picture for papers and slides, with matplotlib (the extra ``memfit[plot]``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InvalidParameterError, MemfitError, PlanFileError
from memfit.report.page_data import Mark, ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg", ".pdf")
_DATE_FIELD = {".svg": "Date", ".pdf": "CreationDate"}
_ACCENT, _MUTED, _MEASURED, _GRID = "#1f56d3", "#566070", "#0a8a5c", "#e1e5ea"


def write_plot(path: str | os.PathLike[str], data: ReportData) -> None:
    """Write the frontier and the marks of ``data`` to ``path``; the suffix gives the format: .png, .svg or .pdf."""
    suffix = check_plot(path)
    if not data.points:
        raise InvalidParameterError("a plot needs at least one plan; give it memfit.frontier(profile) as points")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    _draw(figure.add_subplot(), data)
    # Without a date inside, equal data make equal files.
    options: dict[str, Any] = {"dpi": 200} if suffix == ".png" else {"metadata": {_DATE_FIELD[suffix]: None}}
    try:
        figure.savefig(path, format=suffix[1:], **options)
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_plot(path: str | os.PathLike[str]) -> str:
    """Return the suffix of ``path``; raise where no plot can be written to it."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise InvalidParameterError(f"a plot is written as {', '.join(_SUFFIXES)}; got {os.fspath(path)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MemfitError(
            "plots are drawn with matplotlib, which is not installed: pip install 'memfit[plot]'"
        ) from None
    return suffix


def _draw(axes: Axes, data: ReportData) -> None:
    points = sorted(data.points, key=lambda point: point.peak_bytes)
    unit, unit_bytes = _axis_unit(points[-1].peak_bytes)
    axes.plot(
        [point.peak_bytes / unit_bytes for point in points],
        [100 * point.overhead for point in points],
        color=_ACCENT,
        marker="o",
        markersize=4,
        markerfacecolor="white",
        label="memfit's plans, predicted",
    )
    predicted = [mark for mark in data.marks if not mark.is_measured]
    measured = [mark for mark in data.marks if mark.is_measured]
    _scatter(
        axes, predicted, unit_bytes, marker="D", facecolors="white", edgecolors=_MUTED, label="whole blocks, predicted"
    )
    _scatter(axes, measured, unit_bytes, marker="o", color=_MEASURED, label="measured")
    if data.budget_bytes is not None:
        axes.axvline(data.budget_bytes / unit_bytes, color=_MUTED, linestyle="--", linewidth=1, label="budget")
    axes.set_xlabel(f"peak memory of the step ({unit})")
    axes.set_ylabel("slower than saving everything (%)")
    # User text: a dollar sign in it is no formula.
    axes.set_title(data.title, loc="left", fontsize=11, parse_math=False)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _axis_unit(most_bytes: int) -> tuple[str, int]:
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return next(((unit, size) for unit, size in reversed(units.items()) if most_bytes >= size), ("B", 1))


def _scatter(axes: Axes, marks: list[Mark], unit_bytes: int, **style: Any) -> None:
    if not marks:
        return
    across = [mark.peak_bytes / unit_bytes for mark in marks]
    up = [100 * mark.overhead for mark in marks]
    axes.scatter(across, up, s=28, zorder=3, **style)
    for mark, left, top in zip(marks, across, up, strict=True):
        axes.annotate(
            mark.label,
            (left, top),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=_MUTED,
            parse_math=False,
        )

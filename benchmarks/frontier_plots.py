"""Draws each model's time over its activation memory: memfit's frontier, the eager peers, the compiled group.

    python benchmarks/frontier_plots.py benchmarks/results/frontier-h200/*.json --out docs/images

Bars are quartiles. What is far slower than the rest (save_on_cpu) is drawn at the upper edge with its number, so that
the rest can be distinguished. The colours are those of Okabe and Ito, distinct for colour-blind readers too; markers
differ too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from frontier_results import GIB, PLAIN_AGAIN, ModelResult, load
from frontier_results import OFFLOADING as SAVE_ON_CPU
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from rows import Row

_MEMFIT, _PEER, _COMPILED, _PLAIN, _GRID = "#0072B2", "#D55E00", "#009E73", "#000000", "#e1e5ea"
_OFFLOADING = "#CC79A7"
_SHORT = {
    "torch: checkpoint every block": "every block",
    "torch: checkpoint every 2nd block": "every 2nd",
    "torch: checkpoint every 3rd block": "every 3rd",
    "torch: checkpoint every 4th block": "every 4th",
    "torch: selective, save matmuls + attention": "selective",
    "torchtitan: selective, every 2nd matmul": "torchtitan",
    "transformers: gradient checkpointing": "transformers' switch",
    "timm: gradient checkpointing": "timm's switch",
    "torch: save_on_cpu": "save_on_cpu",
}
# Where a label may stand beside its point, in points, the best places first.
_OFFSETS = [
    (across * distance, up * distance)
    for distance in (8, 16, 26, 38)
    for across, up in ((1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (-1, 0))
]
# For points at the upper edge, which lie close together: right below, so that it is clear whose each is.
_OFFSETS_BELOW = [(across, -distance) for distance in (14, 28, 42, 56) for across in (0, -1, 1)]
# What is slower than this many times the slowest of memfit's overheads goes to the edge.
_EDGE = 2.0


def draw(model: ModelResult) -> Figure:
    """Return the picture of one model, 9 inches wide: at 100 dots an inch it can still be read."""
    figure = Figure(figsize=(9, 5.8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plain, own = model.plain, [row for row in model.memfit_rows(own_only=True) if row.same_as != "plain"]
    at_peaks = [row for row in model.memfit_rows() if row.method not in {mine.same_as or mine.method for mine in own}]
    peers = [row for row in model.peers() if row.is_measured]
    compiled = {
        method: row for method, row in model.compiled.items() if row.is_measured and method.startswith("torch.compile")
    }
    host = [] if model.offloading is None else [row for row in model.offloading.memfit_rows() if not row.same_as]
    if model.offloading is not None:
        # Only there is torch's own offloading among the peers.
        peers += [row for row in model.offloading.peers() if row.method == SAVE_ON_CPU and row.is_measured]
    top = _upper_edge([plain, *own, *at_peaks], [*peers, *compiled.values()])
    line = [plain, *own]
    axes.plot([_gib(row) for row in line], [row.ratio for row in line], color=_MEMFIT, linewidth=1.8, zorder=2)
    _points(axes, host, top, color=_OFFLOADING, marker="^", label="memfit with the host's memory")
    _points(axes, own, top, color=_MEMFIT, marker="o", label="memfit, its own budgets")
    _points(axes, at_peaks, top, color=_MEMFIT, marker="o", filled=False, label="memfit at the peaks of peers")
    _points(axes, peers, top, color=_PEER, marker="s", label="eager peers")
    _points(axes, list(compiled.values()), top, color=_COMPILED, marker="D", label="torch.compile per block, by budget")
    _points(axes, [plain], top, color=_PLAIN, marker="*", size=13, label="plain: save everything")
    axes.axhspan(1 - model.time_noise, 1 + model.time_noise, color=_GRID, zorder=0, label=f"{PLAIN_AGAIN}: noise")
    axes.set_ylim(top=top)
    axes.set_xlim(left=0)
    axes.set_xlabel("activation memory (GiB)", fontsize=12)
    axes.set_ylabel("time, relative to the plain step", fontsize=12)
    axes.tick_params(labelsize=11)
    # The name large, and below it in small type what all of it was measured with: it is long.
    figure.suptitle(model.name, x=0.02, ha="left", fontsize=13, parse_math=False)
    axes.set_title(model.machine_and_frameworks, loc="left", fontsize=7.5, color="#555555", parse_math=False)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the picture: wherever in it some model has points.
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    labels = {_SHORT.get(row.method, row.method): row for row in peers}
    labels |= {method.rpartition(" ")[2]: row for method, row in compiled.items()}
    canvas.draw()
    _label(axes, canvas, labels, top, [plain, *own, *at_peaks, *host, *peers, *compiled.values()])
    return figure


def _upper_edge(ours: Sequence[Row], others: Sequence[Row]) -> float:
    slowest = max(row.quartile_ratios[1] for row in ours)
    edge = 1 + _EDGE * max(slowest - 1, 0.05)
    within = [row.quartile_ratios[1] for row in others if row.ratio <= edge]
    return 1 + 1.12 * (max([slowest, *within]) - 1) if len(within) == len(others) else edge


def _points(
    axes: Axes,
    rows: Sequence[Row],
    top: float,
    *,
    color: str,
    marker: str,
    label: str,
    filled: bool = True,
    size: float = 7,
) -> None:
    if not rows:
        return
    axes.errorbar(
        [_gib(row) for row in rows],
        [min(row.ratio, top) for row in rows],
        yerr=[
            [row.ratio - row.quartile_ratios[0] if row.ratio < top else 0.0 for row in rows],
            [row.quartile_ratios[1] - row.ratio if row.ratio < top else 0.0 for row in rows],
        ],
        linestyle="none",
        marker=marker,
        markersize=size,
        color=color,
        markerfacecolor=color if filled else "white",
        elinewidth=1.2,
        capsize=2.5,
        label=label,
        clip_on=False,
        zorder=3,
    )


def _label(axes: Axes, canvas: FigureCanvasAgg, labels: Mapping[str, Row], top: float, rows: Sequence[Row]) -> None:
    """Write each label near its point, where it covers the least of points and other labels."""
    renderer = canvas.get_renderer()
    # In pixels of the canvas, as all extents are.
    places = [axes.transData.transform((_gib(row), min(row.ratio, top))) for row in rows]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in places]
    for words, row in labels.items():
        text = axes.annotate(
            words if row.ratio <= top else f"{words} ({row.ratio:.1f}×, above)",
            (_gib(row), min(row.ratio, top)),
            xytext=(0, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=10.5,
            color=_PEER if row.method in _SHORT else _COMPILED,
            parse_math=False,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )

        def extent_at(offset: tuple[int, int], text: Annotation = text) -> Bbox:
            text.set_position(offset)
            text.set_horizontalalignment("center" if offset[0] == 0 else "left" if offset[0] > 0 else "right")
            return text.get_window_extent(renderer)

        def covered_at(offset: tuple[int, int]) -> float:
            extent = extent_at(offset)
            inside = Bbox.intersection(extent, axes.bbox)
            is_outside = inside is None or inside.width < extent.width or inside.height < extent.height
            return sum(_shared_area(extent, other) for other in taken) + 1e6 * is_outside

        taken.append(extent_at(min(_OFFSETS if row.ratio <= top else _OFFSETS_BELOW, key=covered_at)))


def _shared_area(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else shared.width * shared.height


def _gib(row: Row) -> float:
    return row.activation_peak_bytes / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for model in load(options.results):
        path = options.out / f"frontier-{model.name}.png"
        draw(model).savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()

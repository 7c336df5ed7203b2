"""The kinds of a model's blocks, by the graphs that they run, and a menu of partitions for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memfit.cuts.graph_cuts import ForwardGraph, GraphCut, chosen_cuts
from memfit.graph.compiled_data.compiled_blocks import EVERYTHING, TORCH, CompiledKind, Partition
from memfit.runtime.compiling.graph_variants import GraphVariants

# Blocks that differ in nothing but a number in their code, such as a rate of stochastic depth, are kinds of one block.
# Then the menus are shorter: compiling an entry takes seconds. Each kind has at least two.
_MOST_ENTRIES = 24
# A price that is above all costs: as few bytes as possible.
_HIGHEST_PRICE = 1e18

LEAST = Partition("least", _HIGHEST_PRICE, {})
"""Saves as little as possible, in graphs that are not known yet."""


def kinds_of(
    graphs_of: Mapping[str, Sequence[GraphVariants]], class_names: Mapping[str, str], num_cuts: int
) -> tuple[CompiledKind, ...]:
    """Return the kinds of the blocks at the paths in ``graphs_of``, which are in the order in which they ran.

    Menus have at most ``num_cuts`` partitions besides torch's own.
    """
    by_graphs: dict[tuple[str, ...], list[str]] = {}
    for path, graphs in graphs_of.items():
        by_graphs.setdefault(tuple(sorted({graph.key for graph in graphs})), []).append(path)
    num_cuts = min(num_cuts, max(1, _MOST_ENTRIES // len(by_graphs) - 1)) if by_graphs else num_cuts
    return tuple(
        _kind(class_names[paths[0]], tuple(paths), _distinct(graphs_of[paths[0]]), num_cuts)
        for paths in by_graphs.values()
    )


def merged_kinds(of_ranks: Sequence[tuple[CompiledKind, ...]]) -> tuple[CompiledKind, ...]:
    """Return the first process's kinds, which know the graphs of all processes where their menus are alike.

    Batches of other sizes give other graphs. A graph that is not known is divided by the price of the partition.
    """
    first = of_ranks[0]
    merged = []
    for number, kind in enumerate(first):
        alike = [
            kinds[number]
            for kinds in of_ranks
            if len(kinds) == len(first)
            and kinds[number].blocks == kind.blocks
            and len(kinds[number].partitions) == len(kind.partitions)
        ]
        partitions = []
        for place, partition in enumerate(kind.partitions):
            saved = {key: names for each in reversed(alike) for key, names in each.partitions[place].saved.items()}
            partitions.append(replace(partition, saved=saved))
        merged.append(replace(kind, partitions=tuple(partitions)))
    return tuple(merged)


def _kind(name: str, paths: tuple[str, ...], graphs: Sequence[GraphVariants], num_cuts: int) -> CompiledKind:
    return CompiledKind(name, paths, _menu(graphs, num_cuts), max(graph.rounding_unit for graph in graphs))


def _distinct(graphs: Sequence[GraphVariants]) -> list[GraphVariants]:
    return list({graph.key: graph for graph in graphs}.values())


def _menu(graphs: Sequence[GraphVariants], num_cuts: int) -> tuple[Partition, ...]:
    """Return the partitions of a block that runs ``graphs``: the same prices for all of them."""
    known = [(graph, graph.forward) for graph in graphs if graph.forward is not None]
    largest = max((forward for _, forward in known), key=lambda forward: forward.cut(0.0).saved_bytes)
    cuts = chosen_cuts(largest.hull(), num_cuts)
    partitions = [_partition(EVERYTHING, 0.0, known)]
    if num_cuts > 1:
        # Where values are unknown, torch's choice is closest to a low price.
        low_price = cuts[min(1, len(cuts) - 1)].price
        by_torch = {graph.key: tuple(sorted(set(graph.torch_saved))) for graph, _ in known}
        partitions.append(Partition(TORCH, low_price, by_torch))
    partitions += [_partition(_share_in_words(cut, cuts), cut.price, known) for cut in cuts[1:-1]]
    partitions.append(_partition(LEAST.name, LEAST.price, known))
    return tuple(_without_repetitions(partitions))


def _partition(name: str, price: float, graphs: Sequence[tuple[GraphVariants, ForwardGraph]]) -> Partition:
    saved = {graph.key: forward.names_of(forward.cut(price).saved) for graph, forward in graphs}
    return Partition(name, price, saved)


def _share_in_words(cut: GraphCut, cuts: Sequence[GraphCut]) -> str:
    """Return what ``cut`` saves of the bytes that the last of the ``cuts`` does not save and the first one does."""
    least_bytes = cuts[-1].saved_bytes
    share = (cut.saved_bytes - least_bytes) / max(cuts[0].saved_bytes - least_bytes, 1)
    return f"{100 * share:.1f}% of bytes"


def _without_repetitions(partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that save different values and have different names."""
    kept: dict[tuple[object, ...], Partition] = {}
    names: set[str] = set()
    for partition in partitions:
        key = tuple(partition.saved.items())
        if key not in kept and partition.name not in names:
            kept[key] = partition
            names.add(partition.name)
    return list(kept.values())

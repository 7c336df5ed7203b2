"""Minimum cuts of a block's graph against all divisions of small graphs, and the menus that are read off them."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

from memfit.cuts.graph_cuts import ForwardGraph, GraphCut, GraphValue, chosen_cuts


def value(name: str, inputs: tuple[int, ...] = (), num_bytes: int = 8, cost: float = 1.0, **facts: bool) -> GraphValue:
    may = {"may_be_saved": True, "may_be_recomputed": bool(inputs), "is_read_by_backward": False} | facts
    return GraphValue(name, inputs, num_bytes, cost, **may)


def drawn_graph(seed: int) -> ForwardGraph:
    draw = random.Random(seed)
    values = [value("x", num_bytes=draw.choice([0, 8, 64]))]
    for place in range(1, 8):
        inputs = tuple(sorted(draw.sample(range(place), draw.randint(1, min(2, place)))))
        may_be_recomputed = draw.random() < 0.8
        values.append(
            value(
                f"v{place}",
                inputs,
                num_bytes=draw.choice([4, 16, 64]),
                cost=float(draw.randint(0, 9)),
                may_be_saved=not may_be_recomputed or draw.random() < 0.8,
                may_be_recomputed=may_be_recomputed,
                is_read_by_backward=draw.random() < 0.4,
            )
        )
    return ForwardGraph(values)


def least_objective(graph: ForwardGraph, price: float) -> float:
    """Return the least of cost plus price over all sets of saved values, by trying each."""
    least = math.inf
    savable = [place for place, each in enumerate(graph.values) if each.may_be_saved]
    for size in range(len(savable) + 1):
        for saved in itertools.combinations(savable, size):
            objective = _objective(graph, set(saved), price)
            least = min(least, objective)
    return least


def _objective(graph: ForwardGraph, saved: set[int], price: float) -> float:
    needed = [place for place, each in enumerate(graph.values) if each.is_read_by_backward]
    seen: set[int] = set()
    total = 0.0
    while needed:
        place = needed.pop()
        if place in seen:
            continue
        seen.add(place)
        each = graph.values[place]
        if place in saved:
            total += price * each.num_bytes
        elif each.may_be_recomputed:
            total += each.cost
            needed.extend(each.inputs)
        else:
            return math.inf
    return total


def test_a_cut_costs_the_least_of_all_divisions() -> None:
    for seed in range(40):
        graph = drawn_graph(seed)
        for price in (0.0, 0.01, 0.1, 1.0):
            cut = graph.cut(price)
            assert math.isclose(
                cut.cost + price * cut.saved_bytes, least_objective(graph, price), rel_tol=1e-6, abs_tol=1e-6
            )


def least_of_linear_program(graph: ForwardGraph, price: float) -> float:
    """Return the least of cost plus price by linear programming: the constraints of a minimum cut are integral."""
    num_values = len(graph.values)
    # First whether each value is needed, then whether it is recomputed. What is needed and not recomputed is saved.
    objective, rows = np.zeros(2 * num_values), []
    bounds = [(0.0, 1.0)] * (2 * num_values)
    for place, each in enumerate(graph.values):
        needed, recomputed = place, num_values + place
        objective[needed] += price * each.num_bytes
        objective[recomputed] += each.cost - price * each.num_bytes
        at_most = [(recomputed, needed), *((recomputed, read) for read in each.inputs if each.may_be_recomputed)]
        if not each.may_be_saved:
            at_most.append((needed, recomputed))
        for smaller, larger in at_most:
            row = np.zeros(2 * num_values)
            row[smaller] += 1.0
            row[larger] -= 1.0
            rows.append(row)
        if each.is_read_by_backward:
            bounds[needed] = (1.0, 1.0)
        if not each.may_be_recomputed:
            bounds[recomputed] = (0.0, 0.0)
    return float(linprog(objective, np.array(rows), np.zeros(len(rows)), bounds=bounds).fun)


def test_cuts_of_a_llama_block_cost_the_least_at_every_price() -> None:
    # Read on an H200 (16,384 tokens, width 2048, bf16): sizes from 8 bytes to hundreds of MiB in one graph.
    rows = json.loads((Path(__file__).parents[1] / "data" / "llama_block_graph.json").read_text())
    graph = ForwardGraph([GraphValue(**{**row, "inputs": tuple(row["inputs"])}) for row in rows])
    for price in (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 100.0):
        cut = graph.cut(price)
        least = least_of_linear_program(graph, price)
        # Costs are rounded to a share of 2**-28 of all costs and prices, for each of the values.
        assert math.isclose(cut.cost + price * cut.saved_bytes, least, rel_tol=1e-5)
    assert [cut.saved_bytes for cut in graph.hull()] == [
        1648500752,
        1329733648,
        1195515920,
        1061298192,
        876748816,
        507650064,
        440541200,
        373432336,
        239214608,
        171057168,
    ]


def test_an_infinite_price_saves_the_fewest_bytes() -> None:
    for seed in range(40):
        graph = drawn_graph(seed)
        fewest = graph.cut(math.inf).saved_bytes
        assert fewest <= graph.cut(1e3).saved_bytes
        assert math.isclose(fewest * 1e9, least_objective(graph, 1e9), rel_tol=1e-6, abs_tol=100.0)


def test_without_a_price_only_what_cannot_be_saved_is_recomputed() -> None:
    graph = ForwardGraph(
        [
            value("x"),
            value("product", (0,), cost=9.0),
            value("view", (1,), cost=0.0, may_be_saved=False, is_read_by_backward=True),
            value("activation", (1,), is_read_by_backward=True),
        ]
    )
    cut = graph.cut(0.0)
    assert graph.names_of(cut.saved) == ("activation", "product")
    assert graph.names_of(cut.recomputed) == ("view",)


def test_names_make_the_same_division_again() -> None:
    for seed in range(40):
        graph = drawn_graph(seed)
        for cut in graph.hull():
            again = graph.saving(graph.names_of(cut.saved))
            assert again is not None
            assert (again.saved, again.recomputed) == (cut.saved, cut.recomputed)


def test_unknown_names_make_no_division() -> None:
    assert drawn_graph(0).saving(("v1", "of another release")) is None


def test_a_value_that_cannot_be_recomputed_is_saved_though_nobody_named_it() -> None:
    graph = ForwardGraph(
        [value("x"), value("seed", (0,), may_be_recomputed=False), value("mask", (1,), is_read_by_backward=True)]
    )
    division = graph.saving(())
    assert division is not None
    assert graph.names_of(division.saved) == ("seed",)
    assert graph.names_of(division.recomputed) == ("mask",)


def test_the_hull_falls_in_bytes_and_rises_in_cost() -> None:
    for seed in range(40):
        hull = drawn_graph(seed).hull()
        assert all(a.saved_bytes > b.saved_bytes and a.cost <= b.cost for a, b in itertools.pairwise(hull))


def test_chosen_cuts_keep_the_ends_and_what_is_farthest_from_their_mixtures() -> None:
    hull = [GraphCut(0.0, (), (), num_bytes, cost) for num_bytes, cost in ((100, 0), (60, 1), (30, 20), (0, 100))]
    assert [cut.saved_bytes for cut in chosen_cuts(hull, 2)] == [100, 0]
    assert [cut.saved_bytes for cut in chosen_cuts(hull, 3)] == [100, 30, 0]
    assert chosen_cuts(hull, 9) == hull

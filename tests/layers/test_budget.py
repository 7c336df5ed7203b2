"""Budget: the least FLOPs within the bytes, against brute force, HiGHS and its own bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from tests.layers.drawn_layers import layer_lists

from memfit import (
    Budget,
    InfeasibleBudgetError,
    LayerMemoryProfile,
    LayerTypeHint,
    build_checkpoint_plan,
    estimate_memory_with_plan,
)
from memfit.layers.budget import LARGEST_EXACT_NUM_LAYERS, LARGEST_GAP, cheapest_drop

MIB = 2**20


def layers_of(sizes_bytes: Sequence[int], flops: Sequence[int]) -> list[LayerMemoryProfile]:
    return [
        LayerMemoryProfile(i, LayerTypeHint.OTHER, size, cost)
        for i, (size, cost) in enumerate(zip(sizes_bytes, flops, strict=True))
    ]


def peak_bytes(sizes_bytes: Sequence[int], dropped: Sequence[int]) -> int:
    return sum(sizes_bytes) - sum(sizes_bytes[i] for i in dropped) + max((sizes_bytes[i] for i in dropped), default=0)


def best_by_brute_force(sizes_bytes: Sequence[int], flops: Sequence[int], budget_bytes: int) -> tuple[int, int]:
    """Return the least FLOPs and, for these, the least peak over all subsets; all saved where that fits."""
    if sum(sizes_bytes) <= budget_bytes:
        return 0, sum(sizes_bytes)
    # A table over all subsets, built up layer by layer: (bytes dropped, largest dropped, FLOPs).
    subsets = [(0, 0, 0)]
    for size, cost in zip(sizes_bytes, flops, strict=True):
        subsets += [(dropped + size, max(largest, size), total + cost) for dropped, largest, total in subsets]
    total_bytes = sum(sizes_bytes)
    return min(
        (total_flops, total_bytes - dropped + largest)
        for dropped, largest, total_flops in subsets
        if total_bytes - dropped + largest <= budget_bytes
    )


@settings(max_examples=400, deadline=None)
@given(layers=layer_lists(min_size=1), share=st.fractions(0, 1))
def test_flops_and_then_bytes_are_the_least_of_all_subsets(layers: list[LayerMemoryProfile], share: Fraction) -> None:
    sizes_bytes = [layer.activation_size_bytes for layer in layers]
    flops = [layer.recompute_flops for layer in layers]
    budget_bytes = max(sizes_bytes) + int(share * (sum(sizes_bytes) - max(sizes_bytes)))
    plan = build_checkpoint_plan(layers, Budget.from_bytes(budget_bytes))
    estimate = estimate_memory_with_plan(layers, plan)
    assert estimate <= budget_bytes
    assert (plan.total_recompute_flops, estimate) == best_by_brute_force(sizes_bytes, flops, budget_bytes)
    assert plan.optimality_gap == 0.0


@settings(max_examples=200, deadline=None)
@given(layers=layer_lists(min_size=1), below=st.integers(1, 10**18))
def test_a_budget_below_the_largest_layer_names_the_minimum_which_then_succeeds(
    layers: list[LayerMemoryProfile], below: int
) -> None:
    minimum_bytes = max(layer.activation_size_bytes for layer in layers)
    tightest = build_checkpoint_plan(layers, Budget.from_bytes(minimum_bytes))
    assert estimate_memory_with_plan(layers, tightest) <= minimum_bytes
    if minimum_bytes:
        with pytest.raises(InfeasibleBudgetError) as refused:
            build_checkpoint_plan(layers, Budget.from_bytes(max(0, minimum_bytes - below)))
        assert refused.value.minimum_bytes == minimum_bytes


@settings(max_examples=200, deadline=None)
@given(layers=layer_lists(min_size=1), shares=st.lists(st.fractions(0, 1), min_size=2, max_size=2))
def test_a_smaller_budget_never_costs_fewer_flops(layers: list[LayerMemoryProfile], shares: list[Fraction]) -> None:
    largest = max(layer.activation_size_bytes for layer in layers)
    total = sum(layer.activation_size_bytes for layer in layers)
    tight, loose = (largest + int(share * (total - largest)) for share in sorted(shares))
    flops = [build_checkpoint_plan(layers, Budget.from_bytes(b)).total_recompute_flops for b in (tight, loose)]
    assert flops[0] >= flops[1]


def least_flops_by_highs(sizes_bytes: Sequence[int], flops: Sequence[int], budget_bytes: int) -> int:
    """Return the least FLOPs by a mixed-integer program per largest dropped layer; its plan is checked in integers."""
    best = sum(flops)
    for largest in sorted(set(sizes_bytes)):
        allowed = [i for i, size in enumerate(sizes_bytes) if 0 < size <= largest]
        demand = sum(sizes_bytes) - budget_bytes + largest
        if sum(sizes_bytes[i] for i in allowed) < demand:
            continue
        result = milp(
            c=np.array([flops[i] for i in allowed], dtype=float),
            constraints=LinearConstraint(np.array([[sizes_bytes[i] for i in allowed]], dtype=float), lb=demand),
            bounds=Bounds(0, 1),
            integrality=np.ones(len(allowed)),
            options={"mip_rel_gap": 0},
        )
        dropped = [i for i, taken in zip(allowed, result.x, strict=True) if taken > 0.5]
        assert peak_bytes(sizes_bytes, dropped) <= budget_bytes
        best = min(best, sum(flops[i] for i in dropped))
    return best


@pytest.mark.parametrize("num_layers", [20, 60, 200])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_flops_equal_those_of_highs_up_to_two_hundred_layers(num_layers: int, share: float) -> None:
    # Numbers far below 2**53 and ten sizes, so that HiGHS, which computes in floats, is exact and quick.
    rng = random.Random(f"{num_layers} {share}")
    kinds = [rng.randint(1, 5000) for _ in range(10)]
    sizes_bytes = [rng.choice(kinds) for _ in range(num_layers)]
    flops = [rng.randint(0, 5000) for _ in range(num_layers)]
    budget_bytes = max(max(sizes_bytes), int(share * sum(sizes_bytes)))
    dropped, gap = cheapest_drop(sizes_bytes, flops, budget_bytes)
    assert gap == 0.0
    assert peak_bytes(sizes_bytes, dropped) <= budget_bytes
    assert sum(flops[i] for i in dropped) == least_flops_by_highs(sizes_bytes, flops, budget_bytes)


def linear_bound(sizes_bytes: Sequence[int], flops: Sequence[int], budget_bytes: int) -> Fraction:
    """Return the least fractional cost over all largest sizes: what no plan can be below."""
    by_ratio = sorted(
        (i for i, size in enumerate(sizes_bytes) if size), key=lambda i: Fraction(flops[i], sizes_bytes[i])
    )
    bounds = []
    for largest in sorted(set(sizes_bytes)):
        demand = sum(sizes_bytes) - budget_bytes + largest
        cost = Fraction(0)
        for i in by_ratio:
            if demand > 0 and sizes_bytes[i] <= largest:
                cost += Fraction(min(demand, sizes_bytes[i]) * flops[i], sizes_bytes[i])
                demand -= sizes_bytes[i]
        if demand <= 0:
            bounds.append(cost)
    return min(bounds)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(LARGEST_EXACT_NUM_LAYERS + 1, 400),
    share=st.fractions(Fraction(1, 10), 1),
    correlated=st.booleans(),
    largest_number=st.sampled_from([9, 10**6, 10**18]),
)
def test_beyond_two_hundred_layers_flops_are_within_a_thousandth_of_the_linear_bound_or_of_the_gap_told(
    seed: int, num_layers: int, share: Fraction, correlated: bool, largest_number: int
) -> None:
    rng = random.Random(seed)
    sizes_bytes = [rng.randint(1, largest_number) for _ in range(num_layers)]
    flops = [size + 3 if correlated else rng.randint(1, largest_number) for size in sizes_bytes]
    budget_bytes = max(max(sizes_bytes), int(share * sum(sizes_bytes)))
    dropped, gap = cheapest_drop(sizes_bytes, flops, budget_bytes)
    assert peak_bytes(sizes_bytes, dropped) <= budget_bytes
    assert 0 <= gap <= LARGEST_GAP
    total_flops = sum(flops[i] for i in dropped)
    bound = linear_bound(sizes_bytes, flops, budget_bytes) if sum(sizes_bytes) > budget_bytes else Fraction(0)
    assert total_flops >= bound
    # The bound told is never below the linear one, up to the rounding of the division that gives the gap. Where the
    # gap is 0 the search has proved the plan itself, however far from the linear bound that is.
    assert total_flops / (1 + gap) >= bound * (1 - Fraction(1, 10**9))


@pytest.mark.parametrize("num_layers", [60, 300])
def test_costs_that_follow_sizes_are_hard_and_the_gap_says_how_far_the_proof_went(num_layers: int) -> None:
    # The linear bound is too low here to prove what the plan is, but for short lists.
    rng = random.Random(num_layers)
    sizes_bytes = [rng.randint(1, 10**9) for _ in range(num_layers)]
    flops = [size + 10**9 for size in sizes_bytes]
    budget_bytes = int(0.8 * sum(sizes_bytes))
    dropped, gap = cheapest_drop(sizes_bytes, flops, budget_bytes)
    assert peak_bytes(sizes_bytes, dropped) <= budget_bytes
    total_flops, bound = sum(flops[i] for i in dropped), linear_bound(sizes_bytes, flops, budget_bytes)
    if num_layers <= LARGEST_EXACT_NUM_LAYERS:
        assert gap == 0.0
        assert total_flops > bound * (1 + LARGEST_GAP)
    else:
        # Of its own bounds, the search has none below the linear one.
        assert 0 < gap < 2e-2
        assert total_flops / (1 + gap) >= bound * (1 - Fraction(1, 10**9))


def test_the_layer_under_recompute_counts_and_ties_go_to_fewer_bytes() -> None:
    # One byte is too much. Dropping any one layer frees nothing while it is recomputed; of the pairs, the two larger
    # ones leave the fewest bytes.
    assert cheapest_drop([1, 2, 100], [1, 1, 1], 102) == ([1, 2], 0.0)


def test_of_identical_layers_the_earlier_are_dropped() -> None:
    plan = build_checkpoint_plan(layers_of([MIB] * 6, [10] * 6), Budget(4))
    # Three go: two to get from six MiB to four, and one that is there while it is recomputed.
    assert plan.checkpointed_layers == (0, 1, 2)
    assert plan.total_recompute_flops == 30


def test_layers_without_bytes_are_never_dropped() -> None:
    assert cheapest_drop([0, 4, 4, 0], [0, 1, 1, 0], 4).dropped_positions == [1, 2]


def test_free_layers_go_first() -> None:
    assert cheapest_drop([4, 4, 4, 4], [0, 9, 0, 9], 12).dropped_positions == [0, 2]


def test_sums_past_64_bits_stay_exact() -> None:
    sizes_bytes = [2**64 - 1 - i for i in range(20)]
    flops = [2**64 - 1 - 3 * i for i in range(20)]
    # Ten layers cannot free what eleven do, and the last eleven are the cheapest.
    budget_bytes = peak_bytes(sizes_bytes, range(9, 20))
    assert cheapest_drop(sizes_bytes, flops, budget_bytes) == (list(range(9, 20)), 0.0)
    # A byte less takes other layers, and is met to the byte.
    dropped, gap = cheapest_drop(sizes_bytes, flops, budget_bytes - 1)
    assert gap == 0.0
    assert peak_bytes(sizes_bytes, dropped) == budget_bytes - 1


@pytest.mark.parametrize(
    ("max_memory_mb", "max_memory_bytes"),
    [(2, 2 * MIB), (0.5, MIB // 2), (Fraction(1, 3), MIB // 3), (np.float32(0.5), MIB // 2), (np.int64(1), MIB)],
)
def test_budgets_in_mib_are_rounded_down_to_bytes(max_memory_mb: float, max_memory_bytes: int) -> None:
    assert Budget(max_memory_mb).max_memory_bytes == max_memory_bytes


def test_an_infinite_budget_saves_everything() -> None:
    assert build_checkpoint_plan(layers_of([5, 6], [1, 1]), Budget(float("inf"))).saved_layers == (0, 1)


def test_the_refusal_says_what_was_given_and_what_is_enough() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"2\.00 MiB \(2097152 bytes\), .* \(1048576 bytes\)"):
        build_checkpoint_plan(layers_of([MIB, 2 * MIB], [1, 1]), Budget(1))

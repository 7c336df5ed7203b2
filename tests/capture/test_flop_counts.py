"""FLOPs of op calls: grouped-query attention is counted by its query heads, and no formula ends a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from memfit.capture.recording.flop_counts import flops_of

aten = torch.ops.aten
FORWARD = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
BATCH, HEADS, QUERIES, KEYS, HEAD_SIZE, VALUE_SIZE = 2, 8, 16, 24, 32, 40
# Multiply-adds of query @ key and of scores @ value, two FLOPs each.
SCORES = 2 * BATCH * HEADS * QUERIES * KEYS * HEAD_SIZE
WEIGHTED = 2 * BATCH * HEADS * QUERIES * KEYS * VALUE_SIZE


def attention_tensors(key_heads: int) -> tuple[torch.Tensor, ...]:
    query = torch.empty(BATCH, HEADS, QUERIES, HEAD_SIZE, device="meta")
    key = torch.empty(BATCH, key_heads, KEYS, HEAD_SIZE, device="meta")
    value = torch.empty(BATCH, key_heads, KEYS, VALUE_SIZE, device="meta")
    return query, key, value


@pytest.mark.parametrize("key_heads", [1, 2, HEADS])
@pytest.mark.parametrize("op", FORWARD, ids=str)
def test_attention_counts_the_heads_of_the_query(op: Any, key_heads: int) -> None:
    query, key, value = attention_tensors(key_heads)
    assert flops_of(op.default, (query, key, value, None), {}, None) == SCORES + WEIGHTED


@pytest.mark.parametrize("key_heads", [1, 2, HEADS])
@pytest.mark.parametrize("op", BACKWARD, ids=str)
def test_the_backward_of_attention_counts_the_heads_of_the_query(op: Any, key_heads: int) -> None:
    query, key, value = attention_tensors(key_heads)
    grad_output = torch.empty(BATCH, HEADS, QUERIES, VALUE_SIZE, device="meta")
    counted = flops_of(op.default, (grad_output, query, key, value), {}, None)
    assert counted == 3 * SCORES + 2 * WEIGHTED


def test_without_groups_the_counts_are_those_of_torch() -> None:
    query, key, value = attention_tensors(HEADS)
    grad_output = torch.empty(BATCH, HEADS, QUERIES, VALUE_SIZE, device="meta")
    for op in FORWARD:
        by_torch = flop_registry[op](query, key, value, out_val=query)
        assert flops_of(op.default, (query, key, value), {}, query) == by_torch
    for op in BACKWARD:
        by_torch = flop_registry[op](grad_output, query, key, value, out_val=query)
        assert flops_of(op.default, (grad_output, query, key, value), {}, query) == by_torch


@pytest.mark.parametrize("op", [aten.mm.default, FORWARD[0].default, BACKWARD[0].default], ids=str)
def test_a_formula_that_fails_counts_nothing(op: Any) -> None:
    vector = torch.empty(3, device="meta")
    assert flops_of(op, (vector, vector, vector, vector), {}, vector) == 0


def test_an_op_without_a_formula_counts_nothing() -> None:
    vector = torch.empty(3, device="meta")
    assert flops_of(aten.relu.default, (vector,), {}, vector) == 0

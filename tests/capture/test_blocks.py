"""Blocks are found, not configured: the repeated modules of a model, with the type that their ops tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.engine.plans import profile_of
from tests.engine.zoo import BY_NAME
from torch import Tensor, nn

import memfit
from memfit import LayerTypeHint


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("transformers-gpt2", ["transformer.h.0", "transformer.h.1"]),
        ("transformers-llama", ["model.layers.0", "model.layers.1"]),
        ("transformers-llama-eager", ["model.layers.0", "model.layers.1"]),
        ("transformers-bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("transformers-t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("transformers-vit", ["vit.layers.0", "vit.layers.1"]),
        ("transformers-mixtral", ["model.layers.0", "model.layers.1"]),
        ("torch-encoder-pre-norm", [f"encoder.layers.{index}" for index in range(3)]),
    ],
)
def test_blocks_of_known_models(name: str, paths: list[str]) -> None:
    profile = profile_of(BY_NAME[name])
    assert [block.path for block in profile.blocks] == paths
    assert {layer.layer_type for layer in profile.layers} == {LayerTypeHint.ATTENTION}
    assert [layer.layer_idx for layer in profile.layers] == list(range(len(paths)))


class Embedded(nn.Module):
    """A table of vectors, with a child so that it counts as more than a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids.clamp(0, 9).long()).sum(-1)


class Attending(nn.Module):
    """Attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        return (projected @ projected.mT).softmax(-1) @ projected


class SumOfBlocks(nn.Module):
    """Two equal blocks side by side, and one parameter, since some blocks have none."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer(), layer()])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return first(x * self.scale) + second(x * self.scale)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()), LayerTypeHint.FFN),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Tanh()), LayerTypeHint.NORM),
        (lambda: nn.Sequential(nn.RMSNorm(6), nn.Tanh()), LayerTypeHint.NORM),
        (lambda: nn.Sequential(nn.Sigmoid(), nn.Tanh()), LayerTypeHint.OTHER),
        (Attending, LayerTypeHint.ATTENTION),
        (Embedded, LayerTypeHint.EMBEDDING),
    ],
    ids=["ffn", "norm", "rms-norm", "other", "attention", "embedding"],
)
def test_a_blocks_type_is_read_from_what_it_computes(layer: Callable[[], nn.Module], expected: LayerTypeHint) -> None:
    profile = memfit.profile(SumOfBlocks(layer), torch.linspace(0.0, 1.0, 2 * 5 * 6).view(2, 5, 6))
    assert [block.path for block in profile.blocks] == ["blocks.0", "blocks.1"]
    assert {found.layer_type for found in profile.layers} == {expected}


def test_a_layer_has_the_bytes_autograd_saves_and_the_flops_of_its_block() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    layers = memfit.profile(model, torch.ones(2, 4)).layers
    # Each block saves the tanh it made: for itself, and as what the next one starts from.
    assert [(layer.activation_size_bytes, layer.recompute_flops) for layer in layers] == [(4 * 8, 2 * 2 * 4 * 4)] * 3


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_torch_jit_can_be_blocks() -> None:
    blocks = (torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2))
    model, batch = nn.Sequential(nn.Linear(4, 4), *blocks), torch.ones(2, 4)
    assert [block.path for block in memfit.profile(model, batch).blocks] == ["1", "2"]
    with pytest.raises(memfit.MemfitError, match=r"torch.jit cannot be fake ones; use mode='real'"):
        memfit.profile(model, batch, mode="fake")

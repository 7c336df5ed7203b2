"""The models of the frontier benchmark, at the sizes people train them on one GPU. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpt import GPT, tokens
from torch import Tensor, nn
from torch.nn import functional

_DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Subject:
    """A model and a batch as memfit takes them, and the blocks that other ways put their checkpoints around.

    The model returns its loss, or an output that has one.
    """

    model: nn.Module
    batch: Any
    blocks: Sequence[nn.Module]

    def output_and_loss(self) -> tuple[Any, Tensor]:
        """Run the forward pass."""
        output = self.model(**self.batch) if isinstance(self.batch, dict) else self.model(*self.batch)
        return output, output if isinstance(output, Tensor) else output.loss

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        return list(self.batch.values() if isinstance(self.batch, dict) else self.batch)


def gpt_2048() -> Subject:
    model = GPT(24, 2048).to(_DEVICE, torch.bfloat16)
    batch = tokens(8, 2048, _DEVICE)
    return Subject(model, (batch,), list(model.blocks))


def gpt_2048_autocast() -> Subject:
    """The same with fp32 weights under bf16 autocast, and dropout."""
    model = GPT(24, 2048, dropout=0.1, autocast=True).to(_DEVICE)
    batch = tokens(8, 2048, _DEVICE)
    return Subject(model, (batch,), list(model.blocks))


def llama_2048() -> Subject:
    return _llama(width=2048, num_layers=16, batch=8)


def llama_4096() -> Subject:
    return _llama(width=4096, num_layers=6, batch=4)


def _llama(width: int, num_layers: int, batch: int) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=32_000,
        attn_implementation="sdpa",
        use_cache=False,  # torch's checkpointing runs forward twice, and the cache would grow twice
    )
    model = LlamaForCausalLM(config).to(_DEVICE, torch.bfloat16)
    ids = tokens(batch, 2048, _DEVICE)
    return Subject(model, {"input_ids": ids, "labels": ids}, list(model.model.layers))


def resnet_152() -> Subject:
    import torchvision

    network = torchvision.models.resnet152().to(_DEVICE, memory_format=torch.channels_last)
    images = torch.randn(128, 3, 224, 224, device=_DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (128,), device=_DEVICE)
    stages = (network.layer1, network.layer2, network.layer3, network.layer4)
    return Subject(AutocastClassifier(network), (images, labels), [block for stage in stages for block in stage])


def vit_large() -> Subject:
    import timm

    network = timm.create_model("vit_large_patch16_224").to(_DEVICE)
    images = torch.randn(128, 3, 224, 224, device=_DEVICE)
    labels = torch.randint(0, 1000, (128,), device=_DEVICE)
    return Subject(AutocastClassifier(network), (images, labels), list(network.blocks))


class AutocastClassifier(nn.Module):
    """A network with its loss, in bf16 autocast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            return functional.cross_entropy(self.network(images), labels)


def mixtral() -> Subject:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        vocab_size=32_000,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).to(_DEVICE, torch.bfloat16)
    ids = tokens(4, 2048, _DEVICE)
    return Subject(model, {"input_ids": ids, "labels": ids}, list(model.model.layers))


class UNet(nn.Module):
    """Four levels of double convolutions with group norm, and skips from each way down to the way up."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_DoubleConv(a, b) for a, b in zip([width, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(_DoubleConv(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        skips = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([skip, functional.interpolate(x, scale_factor=2.0, mode="nearest")], dim=1))
        return self.head(x).float().square().mean()


class _DoubleConv(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width_out, 3, padding=1),
            nn.GroupNorm(8, width_out),
            nn.SiLU(),
            nn.Conv2d(width_out, width_out, 3, padding=1),
            nn.GroupNorm(8, width_out),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def unet() -> Subject:
    model = UNet().to(_DEVICE, torch.bfloat16)
    images = torch.randn(16, 3, 512, 512, device=_DEVICE, dtype=torch.bfloat16)
    return Subject(model, (images,), [*model.down, *model.up])


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt-2048": gpt_2048,
    "llama-2048": llama_2048,
    "llama-4096": llama_4096,
    "gpt-2048-autocast": gpt_2048_autocast,
    "resnet-152": resnet_152,
    "vit-large": vit_large,
    "mixtral": mixtral,
    "unet": unet,
}

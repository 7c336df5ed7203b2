"""The models of the frontier benchmark, at the sizes people train them on one GPU. Nothing is downloaded.

Each is built where it is to run; a small one of the same kind, in fp32, tries the benchmark on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from entrant import Method
from gpt import GPT, tokens
from peers import timm_switch, transformers_switch
from torch import Tensor, nn
from torch.nn import functional

_CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Subject:
    """A model and a batch as memfit takes them, and the blocks that other methods put their checkpoints around.

    The model returns its loss, or an output that has one. ``switch`` is its framework's own checkpointing.
    """

    model: nn.Module
    batch: Any
    blocks: Sequence[nn.Module]
    switch: Mapping[str, Method] = field(default_factory=dict)

    def output_and_loss(self) -> tuple[Any, Tensor]:
        """Run the forward pass."""
        output = self.model(**self.batch) if isinstance(self.batch, dict) else self.model(*self.batch)
        return output, output if isinstance(output, Tensor) else output.loss

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        return list(self.batch.values() if isinstance(self.batch, dict) else self.batch)


class SubjectBuilder(Protocol):
    """Builds a subject on a device, in its real size or a small one."""

    def __call__(self, device: torch.device = ..., *, small: bool = ...) -> Subject: ...


def gpt_2048(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    return _gpt(device, small, torch.float32 if small else torch.bfloat16)


def gpt_2048_autocast(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    """The same with fp32 weights under bf16 autocast, and dropout."""
    return _gpt(device, small, torch.float32, dropout=0.1, autocast=True)


def _gpt(device: torch.device, small: bool, dtype: torch.dtype, **options: Any) -> Subject:
    vocabulary = 256 if small else 32_000
    with device:
        model = GPT(*((4, 64) if small else (24, 2048)), vocabulary, **options).to(dtype)
    batch = tokens(*((2, 64) if small else (8, 2048)), device, vocabulary)
    return Subject(model, (batch,), list(model.blocks))


def llama_2048(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    return _llama(device, small, width=2048, num_layers=16, batch=8)


def llama_4096(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    return _llama(device, small, width=4096, num_layers=6, batch=4)


def _llama(device: torch.device, small: bool, width: int, num_layers: int, batch: int) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    if small:
        width, num_layers, batch = width // 32, 4, 2
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, width // 128),
        num_key_value_heads=max(1, width // 128),
        vocab_size=256 if small else 32_000,
        attn_implementation="sdpa",
        use_cache=False,  # torch's checkpointing runs forward twice, and the cache would grow twice
    )
    return _language_model(LlamaForCausalLM, config, batch, device, small)


def mixtral(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32 if small else 1024,
        intermediate_size=64 if small else 2048,
        num_hidden_layers=3 if small else 16,
        num_attention_heads=1 if small else 8,
        num_key_value_heads=1 if small else 8,
        num_local_experts=4 if small else 8,
        vocab_size=256 if small else 32_000,
        use_cache=False,
    )
    return _language_model(MixtralForCausalLM, config, 2 if small else 4, device, small)


def _language_model(kind: Any, config: Any, batch: int, device: torch.device, small: bool) -> Subject:
    with device:
        model = kind(config).to(torch.float32 if small else torch.bfloat16).train()
    ids = tokens(batch, 64 if small else 2048, device, config.vocab_size)
    switch = {"transformers: gradient checkpointing": lambda: transformers_switch(model)}
    return Subject(model, {"input_ids": ids, "labels": ids}, list(model.model.layers), switch)


def resnet_152(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    import torchvision

    with device:
        network = torchvision.models.resnet18() if small else torchvision.models.resnet152()
        network = network.to(memory_format=torch.channels_last)
    images, labels = _images(2 if small else 128, 64 if small else 224, device)
    stages = (network.layer1, network.layer2, network.layer3, network.layer4)
    blocks = [block for stage in stages for block in stage]
    return Subject(AutocastClassifier(network), (images.to(memory_format=torch.channels_last), labels), blocks)


def vit_large(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    import timm

    with device:
        network = timm.create_model("vit_tiny_patch16_224" if small else "vit_large_patch16_224")
    images, labels = _images(2 if small else 128, 224, device)
    switch = {"timm: gradient checkpointing": lambda: timm_switch(network)}
    return Subject(AutocastClassifier(network), (images, labels), list(network.blocks), switch)


def _images(batch: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with device:
        return torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))


class AutocastClassifier(nn.Module):
    """A network with its loss, in bf16 autocast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            return functional.cross_entropy(self.network(images), labels)


class UNet(nn.Module):
    """Four levels of double convolutions with group norm, and skip connections between equal levels."""

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


def unet(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    dtype = torch.float32 if small else torch.bfloat16
    with device:
        model = UNet(8 if small else 64).to(dtype)
        images = torch.randn(2 if small else 16, 3, *((32, 32) if small else (512, 512)), dtype=dtype)
    return Subject(model, (images,), [*model.down, *model.up])


SUBJECTS: dict[str, SubjectBuilder] = {
    "gpt-2048": gpt_2048,
    "llama-2048": llama_2048,
    "llama-4096": llama_4096,
    "gpt-2048-autocast": gpt_2048_autocast,
    "resnet-152": resnet_152,
    "vit-large": vit_large,
    "mixtral": mixtral,
    "unet": unet,
}

"""Save the profiles of the benchmark's models, and of launch-bound ones, for `ablation.py` and the planner's benchmark.

    python benchmarks/save_profiles.py FOLDER [NAME ...]

Takes a GPU. Each profile is one file, ``NAME.json.gz``.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from frontier_models import SUBJECTS, Subject, SubjectBuilder
from gpt import GPT, tokens

import memfit

_CUDA = torch.device("cuda")


def gpt_launch_bound(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    """12 blocks of width 1024 on 512 tokens: the host launches more slowly than the device computes."""
    with device:
        model = GPT(*((4, 64) if small else (12, 1024)), 256 if small else 32_000).to(torch.bfloat16)
    return Subject(model, (tokens(1, 64 if small else 512, device, 256 if small else 32_000),), list(model.blocks))


def llama_launch_bound(device: torch.device = _CUDA, *, small: bool = False) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4 if small else 12,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=8_000,
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = tokens(2, 256, device, config.vocab_size)
    return Subject(model, {"input_ids": ids, "labels": ids}, list(model.model.layers))


LAUNCH_BOUND: dict[str, SubjectBuilder] = {
    "gpt-launch-bound": gpt_launch_bound,
    "llama-launch-bound": llama_launch_bound,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile the benchmark's models and save the profiles.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="all of them unless given")
    arguments = parser.parse_args()
    builders = {**SUBJECTS, **LAUNCH_BOUND}
    for name in arguments.names or builders:
        subject = builders[name]()
        start = time.perf_counter()
        profile = memfit.profile(subject.model, subject.batch)
        seconds = time.perf_counter() - start
        path = arguments.folder / f"{name}.json.gz"
        profile.save(path)
        size = path.stat().st_size
        print(f"{name}: {len(profile.ops)} ops, {seconds:.1f} s, {size / 2**20:.2f} MiB", flush=True)
        del subject, profile
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

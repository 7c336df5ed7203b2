"""LoRA with peft on a small Llama: frozen weights save nothing, and memfit plans for what is left.

python examples/lora.py        # needs transformers and peft
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memfit


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64, use_cache=False
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    tokens = torch.randint(0, 64, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}

    profile = memfit.profile(model, batch, optimizer=optimizer)
    fitted = memfit.fit(model, batch, budget=profile.peak_bytes * 3 // 4, optimizer=optimizer)
    print(fitted)

    for step in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

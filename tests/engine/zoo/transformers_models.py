"""Models of the transformers library, built from a tiny config, with dropout on and caches as they come."""

from __future__ import annotations

from functools import partial

import torch
from tests.engine.zoo.example import Example, Step
from tests.engine.zoo.gpt import autocast_bf16
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 31
WIDTH = 16
LENGTH = 6
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = {
    **TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
}


def text_batch() -> dict[str, torch.Tensor]:
    """Return token ids, a mask whose second row is padded, and labels."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gpt2(attention: str = "sdpa") -> Step:
    """Return GPT-2 with its three dropouts."""
    config = GPT2Config(**TOKENS, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, attn_implementation=attention)
    return GPT2LMHeadModel(config), text_batch(), None


def llama(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Step:
    """Return Llama with grouped-query attention and attention dropout."""
    model = LlamaForCausalLM(LlamaConfig(**DECODER, attn_implementation=attention))
    return model.to(dtype), text_batch(), None


def mixtral() -> Step:
    """Return Mixtral with jitter in its router and the balancing loss."""
    config = MixtralConfig(
        **DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.1,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config), text_batch(), None


def bert() -> Step:
    """Return BERT with hidden and attention dropout."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config), text_batch(), None


def t5() -> Step:
    """Return T5: encoder, decoder, cross attention, and a cache at its default."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return T5ForConditionalGeneration(config), text_batch(), None


def vit() -> Step:
    """Return a vision transformer with both dropouts on."""
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
        problem_type="single_label_classification",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(5, (2,))}
    return ViTForImageClassification(config), batch, None


EXAMPLES = (
    Example("transformers-gpt2", gpt2, has_blocks=True),
    Example("transformers-gpt2-eager", partial(gpt2, "eager"), has_blocks=True),
    Example("transformers-llama", llama, has_blocks=True),
    Example("transformers-llama-eager", partial(llama, attention="eager"), has_blocks=True),
    Example("transformers-llama-bf16", partial(llama, torch.bfloat16), has_blocks=True),
    Example("transformers-llama-autocast", llama, has_blocks=True, context=autocast_bf16),
    Example("transformers-bert", bert, has_blocks=True),
    Example("transformers-t5", t5, has_blocks=True),
    Example("transformers-vit", vit, has_blocks=True),
    Example("transformers-mixtral", mixtral, has_blocks=True),
)

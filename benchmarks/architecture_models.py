"""Small models of many architectures of transformers: 2 to 4 layers of width 32 to 64, with a batch for a step.

`build` takes the name of an architecture and returns the model, the batch as keyword arguments, and the loss of the
output. Sizes are set by the names that configurations share; what else an architecture needs stands in the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
TOKENS = (2, 48)
Built = tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]

# Set where a configuration has an attribute of that name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "encoder_hidden_size", "embedding_size"), 48
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "d_kv": 12,
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_selected_experts"), 2),
    "moe_intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    # What is skipped at random is another matter, and has tests of its own.
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob"), 0.0),
}

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {},
    "olmo2": {},
    "olmoe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 12, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 12, "sliding_window": 16},
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_hidden_layers": 2,
        "num_layers": None,
        "window_size": 16,
    },
    "gpt_neox": {},
    "gptj": {"rotary_dim": 12},
    "gpt_bigcode": {},
    "codegen": {"rotary_dim": 12},
    "falcon": {"head_dim": None},
    "bloom": {},
    "mpt": {"expansion_ratio": 2},
    "opt": {"word_embed_proj_dim": 48},
    "biogpt": {},
    "xglm": {"attention_heads": 4},
    "openai-gpt": {},
    "ctrl": {"dff": 96},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": None},
    "cohere": {},
    "granite": {},
    "granitemoe": {},
    "nemotron": {},
    "persimmon": {},
    "smollm3": {},
    "helium": {},
    "glm": {},
    "glm4": {},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 2},
    "deepseek_v3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"sliding_window": 16},
    "mamba": {"state_size": 8, "intermediate_size": 96, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_hidden_layers": 4, "use_mamba_kernels": False},
    "recurrent_gemma": {"lru_width": 48, "attention_window_size": 16, "num_hidden_layers": 3},
    "rwkv": {"context_length": 64, "attention_hidden_size": 48},
    "lfm2": {
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    **{
        key: {}
        for key in (
            *(
                "phimoe",
                "ernie4_5",
                "xlstm",
                "minimax",
                "seed_oss",
                "arcee",
                "apertus",
                "bitnet",
                "diffllama",
                "olmo",
                "olmo3",
            ),
            *("hunyuan_v1_dense", "blenderbot-small", "trocr", "cohere2", "doge", "hrm_text"),
        )
    },
    "jetmoe": {"kv_channels": 12},
    "glm4_moe": {"first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "vaultgemma": {"query_pre_attn_scalar": 12, "sliding_window": 16},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 16, "mamba_n_groups": 1} | _MAMBA_HEADS,
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_chunk_size": 16} | _MAMBA_HEADS,
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 80},
    "albert": {"embedding_size": 24},
    "distilbert": {"hidden_dim": 96},
    "electra": {"embedding_size": 24},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "mpnet": {"max_position_embeddings": 80},
    "roformer": {"embedding_size": 48},
    "megatron-bert": {},
    "mobilebert": {"intra_bottleneck_size": 24, "embedding_size": 24, "true_hidden_size": 24},
    "squeezebert": {"embedding_size": 48},
    "convbert": {"embedding_size": 48},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 48},
    "fnet": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
    "esm": {"max_position_embeddings": 80, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "xlm": {"emb_dim": 48},
    "flaubert": {"emb_dim": 48},
    **{key: {"max_position_embeddings": 80} for key in ("ibert", "camembert", "xlm-roberta", "data2vec-text")},
    **{key: {} for key in ("ernie", "layoutlm", "yoso", "mra", "tapas", "eurobert")},
    "longformer": {"attention_window": 16, "max_position_embeddings": 80},
    "big_bird": {"attention_type": "original_full"},
    "rembert": {"input_embedding_size": 24, "output_embedding_size": 24},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}
SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "t5": {"decoder_start_token_id": 0, "num_decoder_layers": 2, "num_layers": 2},
    "mt5": {"decoder_start_token_id": 0, "num_decoder_layers": 2, "num_layers": 2},
    "bart": {},
    "mbart": {},
    "pegasus": {},
    "marian": {},
    "blenderbot": {},
    "m2m_100": {},
    "longt5": {"decoder_start_token_id": 0, "num_decoder_layers": 2, "num_layers": 2, "local_radius": 7},
    "switch_transformers": {
        "decoder_start_token_id": 0,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    **{key: {} for key in ("plbart", "mvp", "pegasus_x", "nllb-moe", "fsmt")},
    "led": {"attention_window": 16, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "umt5": {"decoder_start_token_id": 0, "num_decoder_layers": 2, "num_layers": 2},
}
# Four stages, or two.
_WIDTHS, _DEPTHS = [16, 32, 48, 64], [1, 1, 1, 1]
_STAGES = {"hidden_sizes": _WIDTHS, "depths": _DEPTHS}
_WINDOWS = {"embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
VISION: dict[str, dict[str, Any]] = {
    "vit": {},
    "beit": {},
    "dinov2": {},
    "convnext": _STAGES | {"patch_size": 4},
    "convnextv2": _STAGES | {"patch_size": 4},
    "resnet": _STAGES | {"embedding_size": 16, "layer_type": "basic"},
    "regnet": _STAGES | {"embedding_size": 16, "groups_width": 8},
    "swin": _WINDOWS | {"num_attention_heads": None},
    "swinv2": _WINDOWS | {"num_attention_heads": None},
    "poolformer": _STAGES | {"patch_size": None},
    "segformer": _STAGES | {"num_attention_heads": [1, 2, 4, 4], "patch_size": None, "decoder_hidden_size": 32},
    "mobilevit": {"hidden_sizes": [24, 32, 48], "neck_hidden_sizes": [8, 16, 24, 32, 48, 48, 64], "patch_size": 2},
    "mobilenet_v2": {},
    "pvt_v2": _STAGES | {"num_attention_heads": [1, 2, 4, 4]},
    "focalnet": {"embed_dim": 24, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "siglip": {},
    **{key: {} for key in ("dinov2_with_registers", "vit_msn", "data2vec-vision", "ijepa")},
    "pvt": _STAGES | {"num_attention_heads": [1, 2, 4, 4]},
}
AUDIO: dict[str, dict[str, Any]] = {
    "wav2vec2": {},
    "hubert": {},
    "wavlm": {},
    "unispeech-sat": {},
    "data2vec-audio": {},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32, "patch_size": 16},
    **{key: {} for key in ("wav2vec2-conformer", "unispeech")},
    "sew": {"squeeze_factor": 2},
    "sew-d": {"squeeze_factor": 2},
}
SPEECH: dict[str, dict[str, Any]] = {
    "whisper": {"max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 20},
    "speech_to_text": {"max_source_positions": 80, "max_target_positions": 64, "input_feat_per_channel": 20},
}
# Their configurations name none of the shared sizes where it matters.
_AS_THEY_ARE = {"mobilenet_v2"}
_CONVOLUTIONS = {"conv_dim": (24, 24, 24), "conv_stride": (5, 4, 2), "conv_kernel": (10, 8, 4)}
_CONVOLUTIONS |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_CONVOLUTIONS |= {"classifier_proj_size": 32, "conv_channels": 32}

# Other architectures with what the others leave out: layers that are skipped at random, a first step that differs.
VARIANTS: dict[str, dict[str, Any]] = {
    "hubert, random layers": {"layerdrop": 0.3, "mask_time_prob": 0.3, "mask_time_length": 2},
    "wav2vec2, random layers": {"layerdrop": 0.3},
    "bart, random layers": {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
    "opt, random layers": {"layerdrop": 0.3},
    "ibert, quantized": {"quant_mode": True, "max_position_embeddings": 80},
}
TIME_SERIES: dict[str, dict[str, Any]] = {"time_series_transformer": {}, "autoformer": {}, "informer": {}}

ARCHITECTURES = (*CAUSAL, *MASKED, *SEQUENCE_TO_SEQUENCE, *VISION, *AUDIO, *SPEECH, *TIME_SERIES, *VARIANTS)


def build(name: str) -> Built:
    """Return a small model of the architecture, its batch and its loss."""
    torch.manual_seed(0)
    for builder, table in _BUILDERS:
        if name in table:
            return builder(name, table[name])
    raise ValueError(f"{name!r} is not one of {', '.join(ARCHITECTURES)}")


def _config(name: str, sizes: dict[str, Any], more: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    known = AutoConfig.for_model(name)
    given = {key: value for key, value in sizes.items() if value is not None and _has(known, key)}
    return AutoConfig.for_model(name, **{key: value for key, value in (given | more).items() if value is not None})


def _has(config: Any, key: str) -> bool:
    value = getattr(config, key, None)
    return value is not None or key in config.to_dict() or key in config.attribute_map


def _tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, TOKENS, generator=generator)


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _causal(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_config(name, SIZES, more))
    return model.train(), {"input_ids": _tokens(), "labels": _tokens()}, _own_loss


def _masked(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_config(_config(name, SIZES, more))
    return model.train(), {"input_ids": _tokens(), "labels": _tokens(1)}, _own_loss


def _sequence_to_sequence(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(_config(name, SIZES, more))
    return model.train(), {"input_ids": _tokens(), "labels": _tokens(1)}, _own_loss


def _vision(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForImageClassification

    sizes = {"image_size": 32} if name in _AS_THEY_ARE else SIZES
    config = _config(name, sizes, more)
    if name == "siglip":
        for key, value in SIZES.items():
            if value is not None and _has(config.vision_config, key):
                setattr(config.vision_config, key, value)
    model = AutoModelForImageClassification.from_config(config)
    size = 64 if name in {"convnext", "convnextv2", "mobilevit"} else 32
    return model.train(), {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.arange(4) % 2}, _own_loss


def _audio(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForAudioClassification

    model = AutoModelForAudioClassification.from_config(_config(name, SIZES | _CONVOLUTIONS, more))
    samples = torch.randn(2, 64, 32) if name == "audio-spectrogram-transformer" else torch.randn(2, 2000)
    return model.train(), {"input_values": samples, "labels": torch.arange(2)}, _own_loss


def _speech(name: str, more: dict[str, Any]) -> Built:
    from transformers import AutoModelForSpeechSeq2Seq

    model = AutoModelForSpeechSeq2Seq.from_config(_config(name, SIZES | _CONVOLUTIONS, more))
    features = torch.randn(2, 20, 64) if name == "whisper" else torch.randn(2, 64, 20)
    return model.train(), {"input_features": features, "labels": _tokens()}, _own_loss


def _time_series(name: str, more: dict[str, Any]) -> Built:
    import transformers

    kinds = {"time_series_transformer": "TimeSeriesTransformer", "autoformer": "Autoformer", "informer": "Informer"}
    # Layers are skipped at random, as they are unless that is switched off.
    lengths = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}
    config = _config(name, {"d_model": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}, lengths | more)
    model = getattr(transformers, f"{kinds[name]}ForPrediction")(config)
    past, future = (4, 18), (4, 8)
    batch = {
        "past_values": torch.rand(past),
        "past_time_features": torch.rand(*past, 1),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.rand(future),
        "future_time_features": torch.rand(*future, 1),
    }
    return model.train(), batch, _own_loss


def _variant(name: str, more: dict[str, Any]) -> Built:
    base = name.partition(",")[0]
    builder, table = next((builder, table) for builder, table in _BUILDERS if base in table)
    return builder(base, table[base] | more)


_BUILDERS: tuple[tuple[Callable[[str, dict[str, Any]], Built], dict[str, dict[str, Any]]], ...] = (
    (_causal, CAUSAL),
    (_masked, MASKED),
    (_sequence_to_sequence, SEQUENCE_TO_SEQUENCE),
    (_vision, VISION),
    (_audio, AUDIO),
    (_speech, SPEECH),
    (_time_series, TIME_SERIES),
    (_variant, VARIANTS),
)

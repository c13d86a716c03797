# SPDX-License-Identifier: Apache-2.0
"""Model shapes that the GPU benchmarks run with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.models.config import ModelConfig
from mizzen.models.registry import read_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "eos_token_id": 128001,
}


def shape(
    base: dict[str, Any], hidden: int, middle: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    """Return `base` as a config.json with these sizes and 8 KV heads; `middle` is the intermediate size."""
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        **more,
    }


def llama_rope(factor: float) -> dict[str, Any]:
    """Return the `rope_scaling` of Llama 3 with the given `factor`."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
PHI4 = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 250000.0,
    "dtype": "bfloat16",
    "eos_token_id": 100265,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 131072,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000.0,
    "sliding_window": None,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
    },
    "sliding_window": 4096,
    "dtype": "bfloat16",
    "eos_token_id": 100257,
}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 200002,
}


def compressed(fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for all linear layers but the output head."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FP8 = compressed(
    "float-quantized",
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
)
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
INT4 = compressed(
    "pack-quantized",
    {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "dynamic": False,
    },
    None,
)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
    ],
}
QUANTIZATIONS = {"fp8": FP8, "fp8-blocks": FP8_BLOCKS, "int4": INT4}
"""`quantization_config` of the quantized shapes, by the end of their names."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": shape(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-8b": shape(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-32b": shape(QWEN3, 5120, 25600, 64, 64, tie_word_embeddings=False),
    "qwen3-30b-a3b": shape(
        QWEN3_MOE, 2048, 6144, 48, 32, num_key_value_heads=4, num_experts=128, moe_intermediate_size=768
    ),
    "mixtral-8x7b": shape(
        MIXTRAL, 4096, 14336, 32, 32, head_dim=128, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt-oss-20b": shape(GPT_OSS, 2880, 2880, 24, 64, head_dim=64, num_local_experts=32),
    "llama-3.2-1b": shape(
        LLAMA3, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_scaling=llama_rope(32.0)
    ),
    "llama-3.1-8b": shape(
        LLAMA3, 4096, 14336, 32, 32, head_dim=128, tie_word_embeddings=False, rope_scaling=llama_rope(8.0)
    ),
    "gemma-3-12b": shape(GEMMA3, 3840, 15360, 48, 16),
    "phi-4": shape(PHI4, 5120, 17920, 40, 40, num_key_value_heads=10),
    "mistral-small-24b": shape(MISTRAL, 5120, 32768, 40, 32),
    "olmo-3-7b": shape(OLMO3, 4096, 11008, 32, 32, num_key_value_heads=32),
    "tiny": shape(QWEN3, 64, 96, 2, 8, tie_word_embeddings=True, head_dim=16, vocab_size=512, eos_token_id=1),
}
"""config.json of each shape; "tiny" is not a real model, but serves to check that everything works."""
SHAPES |= {
    f"{name}-{end}": SHAPES[name] | {"quantization_config": config}
    for name in ("qwen3-8b", "qwen3-30b-a3b", "tiny")
    for end, config in QUANTIZATIONS.items()
}
SHAPES["gpt-oss-20b-mxfp4"] = SHAPES["gpt-oss-20b"] | {"quantization_config": MXFP4}


BERT = {"architectures": ["BertModel"], "vocab_size": 30522, "hidden_act": "gelu", "dtype": "bfloat16"}
ENCODER_SHAPES: dict[str, dict[str, Any]] = {
    "bert-large": shape(BERT, 1024, 4096, 24, 16),
    "bert-base": shape(BERT, 768, 3072, 12, 12),
    "tiny-bert": shape(BERT, 64, 96, 2, 4, vocab_size=512),
}
"""config.json of each encoder, for the benchmarks of pooling."""


@contextmanager
def shape_folder(shape: str) -> Iterator[Path]:
    """Provide a temporary model folder of a shape, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps((SHAPES | ENCODER_SHAPES)[shape]))
        yield Path(folder)


def config_of(shape: str) -> ModelConfig:
    """Return the model configuration of a shape."""
    with shape_folder(shape) as folder:
        return read_config(folder)

"""Builds an engine from its options."""

from __future__ import annotations

from pathlib import Path

import torch

from mizzen.attention.base import Geometry, MixedAttention, PagedKV
from mizzen.attention.registry import make_attention
from mizzen.engine.config import EngineOptions
from mizzen.layers.build import Build
from mizzen.models.config import ModelConfig
from mizzen.models.decoder import Decoder
from mizzen.weights.load import Progress, fill_dummy, load_checkpoint

DUMMY_SEED = 0


def dtype_of(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """Resolve the precision of weights and KV."""
    name = options.dtype
    if name == "auto":
        name = config.dtype if options.device == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def make_model(options: EngineOptions, config: ModelConfig, progress: Progress) -> Decoder:
    """Build the model on its device and fill its weights."""
    build = Build(device=torch.device(options.device), dtype=dtype_of(options, config))
    with torch.inference_mode():
        model = Decoder(build, config)
        if options.load_format == "dummy":
            fill_dummy(model.targets(), seed=DUMMY_SEED, progress=progress)
        else:
            load_checkpoint(
                Path(options.model), model.targets(), tied=config.tie_embeddings, progress=progress
            )
    return model


def make_kv(model: Decoder, page_size: int, pages: int, *, prefill: str, decode: str) -> MixedAttention:
    """Allocate the paged KV of a model and the attention over it."""
    config, weight = model.config, model.embedding.weight
    geometry = Geometry(
        heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, windows=config.windows
    )
    shape = (config.layers, pages * page_size, config.kv_heads, config.head_dim)
    kv = PagedKV(
        keys=torch.zeros(shape, dtype=weight.dtype, device=weight.device),
        values=torch.zeros(shape, dtype=weight.dtype, device=weight.device),
        page_size=page_size,
    )
    return make_attention(geometry, kv, prefill=prefill, decode=decode)

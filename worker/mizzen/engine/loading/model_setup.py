# SPDX-License-Identifier: Apache-2.0
"""Builds the model with its KV cache and attention, and determines the number of KV pages.

The loader calls these functions in its start-up phases.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from mizzen.attention.base import MixedAttention, PagedKV
from mizzen.attention.registry import make_attention
from mizzen.common.model_task import Task
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.resolve import rank_geometry, resolve_dtype, uses_own_kernels
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import MeasuredWeights
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized import choose_linear
from mizzen.layers.linear_methods.quantized_gpu import make_quantized_linear
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.quantized.stored_layer import IGNORED, ZEROS
from mizzen.layers.sharding import Axis, Mesh, choose_expert_groups
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.base import DecoderModel
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.models.pooling.output import load_dense_layers
from mizzen.models.served_model import ServedModel
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import RankGroup
from mizzen.quantization.online import AS_STORED, choose_quantization
from mizzen.weights.expert_layout import with_expert_layout
from mizzen.weights.kv_scales import fold_kv_scales, read_kv_scales
from mizzen.weights.load import ProgressCallback, fill_dummy, has_untied_head, load_checkpoint, target_bytes
from mizzen.weights.stored_schemes import with_stored_schemes

if TYPE_CHECKING:
    from mizzen.models.transformers_backend.model import TransformersModel

log = logging.getLogger(__name__)

DUMMY_SEED = 0
"""Seed of the random values of `--load-format dummy`."""


def make_model(
    options: EngineOptions,
    config: ModelConfig,
    progress: ProgressCallback,
    group: RankGroup | None = None,
    methods: list[MeasuredWeights] | None = None,
) -> ServedModel:
    """Build the model or a rank's shard on its device, and load its weights.

    Args:
        options: Engine options.
        config: Shape of the model.
        progress: Called with the bytes of weights loaded so far and the bytes of all weights.
        group: Process group of the ranks; None for a single rank.
        methods: List to which the linear methods of all layers and the quantized experts are added.

    Raises:
        ConfigError: The model does not support an option; the message names it.
        WeightsError: The checkpoint cannot be loaded.
    """
    config = replace(config, quantization=choose_quantization(options.quantization, config.quantization))
    fused, dummy = uses_own_kernels(options), options.load_format == "dummy"
    if config.text_tensors is not None and config.vision is None:
        log.warning(
            "only the text part of the model is served: images are rejected, and tensors are not loaded "
            "whose names begin with %s",
            ", ".join(config.text_tensors.skipped),
        )
    if (
        config.tie_embeddings
        and config.generates
        and not dummy
        and has_untied_head(Path(options.model), config.block.names, config.text_tensors)
    ):
        log.warning(
            "lm_head.weight differs from the embedding, so lm_head.weight is used, "
            "although tie_word_embeddings is set"
        )
        config = replace(config, tie_embeddings=False)
    if not dummy:
        config = with_expert_layout(config, Path(options.model))
        if options.quantization == AS_STORED:
            config = with_stored_schemes(config, Path(options.model))
    dtype = resolve_dtype(options, config)
    log_precision(options, config, dtype)
    build = BuildContext(
        device=group.config.device if group else torch.device(options.device),
        dtype=dtype,
        mesh=make_mesh(options, config, group),
        make_linear=choose_linear(
            config.quantization,
            SmallBatchLinear if fused else UnquantizedLinear,
            make_quantized_linear if fused else DequantizedLinear,
        ),
        methods=methods if methods is not None else [],
        counts_experts=options.expert_load == "on" and (group is None or group.rank == 0),
        fused=fused,
        collectives=group.collectives if group else SINGLE_RANK,
    )
    with torch.inference_mode():
        if config.implementation == "transformers":
            model = build_transformers_model(options, build, config)
        else:
            model = DecoderModel(build, config)
        if dummy:
            fill_dummy(model.targets(), seed=DUMMY_SEED, progress=progress)
        else:
            load_checkpoint(
                Path(options.model),
                checkpoint_targets(options, model),
                tied=config.tie_embeddings,
                progress=progress,
                names=config.block.names,
                part=config.text_tensors,
                ignored=(*model.ignored, *([IGNORED] if config.quantization.schemes else [])),
                ignored_zeros=[ZEROS] if config.quantization.schemes else [],
            )
        model.finish()
        if not dummy and config.task is not Task.CLASSIFY:
            model.pooled.dense = load_dense_layers(
                Path(options.model), config.dense, config.hidden_size, build.device
            )
    if config.implementation == "transformers":
        if group is not None:
            group.barrier("loaded")  # the check sums over ranks, and must not wait for their weights
        check_transformers_model(model, build.device)
    return model


def make_mesh(options: EngineOptions, config: ModelConfig, group: RankGroup | None) -> Mesh:
    """Return a rank's place on the axes along which the model is sharded; `group` is None for one rank."""
    if group is None:
        return Mesh()
    return Mesh(Axis(group.rank, group.size), choose_expert_groups(config, group.size, options.expert))


def log_precision(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> None:
    """Log that quantized weights get another data type on a GPU than the checkpoint has, if so."""
    name = str(dtype).removeprefix("torch.")
    if options.dtype == "auto" and options.device == "cuda" and name != config.dtype:
        log.info(
            "the model computes in %s, as the kernels of quantized weights do, although the checkpoint was "
            "saved in %s; --dtype %s would be slow",
            name,
            config.dtype,
            config.dtype,
        )


def measure_weights(model: ServedModel, methods: Iterable[MeasuredWeights]) -> Counter[str]:
    """Return the bytes of a loaded model's weights by their format.

    Args:
        model: The model or a rank's shard.
        methods: Linear methods of all layers, and quantized experts.
    """
    sizes = measure_targets(model.targets())
    for method in methods:
        sizes.update(method.format_bytes())
    return sizes


def measure_targets(targets: Iterable[WeightTarget]) -> Counter[str]:
    """Return the bytes of the destinations of a checkpoint's tensors by their dtype."""
    sizes: Counter[str] = Counter()
    for target in targets:
        sizes[str(target.destination.dtype).removeprefix("torch.")] += target_bytes(target)
    return sizes


def inspect_config(
    options: EngineOptions, config: ModelConfig, group: RankGroup | None = None
) -> ModelConfig:
    """Return the configuration with the real sizes of the model, if Transformers implements it.

    Rank 0 of a `group` inspects the model, which takes seconds, and all ranks return or raise the same.

    Raises:
        ConfigError: Transformers is not installed, or the model cannot be served.
    """
    if config.implementation == "native":
        return config
    if group is None:
        return inspect_in_transformers(options, config)
    inspected = InspectedConfig()
    if group.rank == 0:
        try:
            inspected = InspectedConfig(config=inspect_in_transformers(options, config))
        except ConfigError as error:
            inspected = InspectedConfig(error=str(error))
    sent = group.exchange("config", msgspec.json.encode(inspected).decode())[0]
    inspected = INSPECTED_CONFIG.decode(sent)
    if inspected.config is None:
        raise ConfigError(inspected.error)
    return inspected.config


class InspectedConfig(msgspec.Struct, frozen=True):
    """Result of an inspection, which rank 0 sends to all ranks: a configuration, or the error."""

    config: ModelConfig | None = None
    error: str = ""


INSPECTED_CONFIG = msgspec.json.Decoder(InspectedConfig)
"""Made once: msgspec examines a type when it is first used, which may crash in two threads at once."""


def inspect_in_transformers(options: EngineOptions, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the sizes that the model has in Transformers.

    Raises:
        ConfigError: Transformers is not installed, or the model cannot be served.
    """
    try:
        from mizzen.models.transformers_backend.inspection import inspect_model
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "transformers":
            raise ConfigError(
                f"{config.architecture} needs Transformers, which cannot be imported ({error}): install "
                "mizzen[transformers]"
            ) from error
        raise ConfigError(
            f"{config.architecture} has no native implementation, and Transformers is not installed "
            f"({error}): install mizzen[transformers]"
        ) from error
    return inspect_model(Path(options.model), config, resolve_dtype(options, config), options.tensor)


def build_transformers_model(options: EngineOptions, build: BuildContext, config: ModelConfig) -> ServedModel:
    """Build a model of Transformers, without its weights."""
    from mizzen.models.transformers_backend.loading import make_transformers_model

    return make_transformers_model(Path(options.model), build, config, replace=options.fusion == "auto")


def checkpoint_targets(options: EngineOptions, model: ServedModel) -> Iterable[WeightTarget]:
    """Return the destinations of a checkpoint's tensors, by their names in the files."""
    if model.config.implementation == "native":
        return model.targets()
    from mizzen.models.transformers_backend import loading

    return loading.checkpoint_targets(Path(options.model), cast("TransformersModel", model))


def check_transformers_model(model: ServedModel, device: torch.device) -> None:
    """Check the results of a loaded model of Transformers.

    Raises:
        ConfigError: the model cannot be served.
    """
    from mizzen.models.transformers_backend.loading import check_independence

    check_independence(cast("TransformersModel", model), device)


def make_attention_with_kv(
    model: ServedModel,
    page_size: int,
    pages: int,
    *,
    prefill: str,
    decode: str,
    dtype: torch.dtype | None = None,
    key_scales: tuple[float, ...] = (),
) -> MixedAttention:
    """Allocate the paged KV cache of a model, and create the attention backends over it.

    Args:
        model: The model or a rank's shard.
        page_size: Tokens per KV page.
        pages: Number of KV pages, including the scratch page.
        prefill: Name of the attention backend for prefill, or "auto".
        decode: Name of the attention backend for decode, or "auto".
        dtype: Data type of the KV cache; by default that of the weights.
        key_scales: Scale of the keys in each layer; empty if all are 1.
    """
    config, weight = model.config, model.embedding.weight
    geometry = rank_geometry(config, model.collectives.size)
    shape = (config.layers, pages * page_size, geometry.kv_heads, config.head_dim)
    keys, values = (zeros(shape, dtype or weight.dtype, weight.device) for _ in range(2))
    kv = PagedKV(
        keys=keys,
        values=values,
        page_size=page_size,
        key_scales=key_scales,
        sinks=model.attention_sinks(),
    )
    return make_attention(geometry, kv, prefill=prefill, decode=decode)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor of zeros; on CPU, the system provides a page of memory when it is first written."""
    if device.type != "cpu":
        return (
            torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
            .view(dtype)
            .view(shape)
        )
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def fold_checkpoint_kv_scales(
    options: EngineOptions, model: ServedModel, kv_dtype: torch.dtype
) -> tuple[float, ...]:
    """Fold the checkpoint's scales for an 8-bit KV cache into the weights.

    Returns the key scale of each layer, or an empty tuple if all are 1 or the KV cache is not 8-bit.

    Raises:
        WeightsError: A scale is not a positive number.
    """
    if kv_dtype != torch.float8_e4m3fn or options.load_format == "dummy":
        return ()
    if not isinstance(model, DecoderModel):  # the model's code in Transformers
        return ()
    scales = read_kv_scales(Path(options.model), model.config.text_tensors)
    fold_kv_scales([layer.attention for layer in model.layers], scales)
    keys = tuple(scales.get(layer, (1.0, 1.0))[0] for layer in range(model.config.layers))
    return keys if any(scale != 1 for scale in keys) else ()

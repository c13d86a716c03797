# SPDX-License-Identifier: Apache-2.0
"""Decides whether a model of Transformers can be served, and finds the sizes of its attention.

The model runs without weights, so this takes seconds even for large models.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.block import BlockConfig, TensorNames
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend.build import build_on_meta, read_hf_config
from mizzen.models.transformers_backend.generic_config import refuse_other_layers
from mizzen.models.transformers_backend.meta_run import (
    AttentionCall,
    Recorder,
    record_calls,
    record_windows,
    run_on_meta,
)
from mizzen.models.transformers_backend.model import TransformersModel
from mizzen.models.transformers_backend.replacement import find_name

log = logging.getLogger(__name__)


def single_value(architecture: str, what: str, values: list[Any]) -> Any:
    """Return the value that all layers share.

    Raises:
        ConfigError: the layers differ.
    """
    if len(set(values)) != 1:
        shown = ", ".join(sorted({str(value) for value in values}))
        raise ConfigError(
            f"{architecture} cannot be served: {what} differs between layers ({shown}). Use another model"
        )
    return values[0]


def inspect_model(folder: Path, config: ModelConfig, dtype: torch.dtype, ranks: int) -> ModelConfig:
    """Return the configuration of a model with the sizes that it has in Transformers.

    Args:
        folder: Model folder.
        config: Configuration as `generic_config` reads it.
        dtype: Data type of the weights.
        ranks: Number of ranks that share the model.

    Raises:
        ConfigError: the model cannot be served; the message names the reason and a way out.
    """
    name = config.architecture
    hf_config = read_hf_config(folder, name)
    refuse_other_layers(getattr(hf_config, "layer_types", None), str(folder / "config.json"))
    model = build_on_meta(hf_config, name, dtype)
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} has an encoder, which is not supported: use a decoder-only model")
    calls = record_calls(model)
    check_layers(name, hf_config, calls)
    windows = record_windows(model)
    base, head = getattr(model, model.base_model_prefix), model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{name} cannot be served: it has no output head")
    refined = replace(
        config,
        vocab_size=head.weight.shape[0],
        hidden_size=head.weight.shape[1],
        layers=len(calls),
        heads=single_value(name, "the number of heads", [call.heads for call in calls]),
        kv_heads=single_value(name, "the number of KV heads", [call.kv_heads for call in calls]),
        head_dim=single_value(name, "head_dim", [call.head_dim for call in calls]),
        windows=tuple(windows),
        tie_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
        transformers_parameters=sum(parameter.numel() for parameter in model.parameters()),
        block=BlockConfig(
            attention_scale=single_value(name, "the attention's scaling", [call.scale for call in calls]),
            attention_softcap=single_value(name, "the attention's softcap", [call.softcap for call in calls]),
            names=TensorNames(
                prefix=f"{model.base_model_prefix}.",
                embedding=find_name(base, base.get_input_embeddings()),
                head=find_name(model, head),
            ),
        ),
    )
    if ranks == 1:
        return refined
    return replace(refined, replicates_attention=replicates_attention(refined, model, dtype, ranks))


def check_layers(architecture: str, hf_config: Any, calls: list[AttentionCall]) -> None:
    """Check that each decoder layer calls the attention once.

    Raises:
        ConfigError: some layers do not call it, so that their state would be lost between steps, or some call
            it several times.
    """
    layers = getattr(hf_config, "num_hidden_layers", None)
    if not calls or (isinstance(layers, int) and len(calls) < layers):
        raise ConfigError(
            f"{architecture} cannot be served: {len(calls)} of its {layers} layers use Transformers' "
            "attention interface; other layers, such as recurrent ones, are not supported. Use another model"
        )
    if len({id(call.module) for call in calls}) < len(calls):
        raise ConfigError(
            f"{architecture} cannot be served: it runs a layer several times. Use another model"
        )


def replicates_attention(config: ModelConfig, model: Any, dtype: torch.dtype, ranks: int) -> bool:
    """Return whether every rank holds all heads, if `ranks` ranks share a model on the meta device.

    Raises:
        ConfigError: the model cannot be sharded; the message says why.
    """
    build = BuildContext(device=torch.device("meta"), dtype=dtype, mesh=Mesh(Axis(0, ranks)))
    with torch.inference_mode():
        sharded = TransformersModel(build, config, model, replace=True)
    setattr(model, model.base_model_prefix, sharded.base)
    sharded.keep_rotation()
    if sharded.deferred_adds is not None:
        sharded.deferred_adds.turn_off()
    recorder = Recorder(model)
    try:
        run_on_meta(model, recorder)
    except ConfigError as error:
        raise ConfigError(
            f"{config.architecture} cannot be sharded over {ranks} ranks along Transformers' tensor parallel "
            f"plan: {error}. Use --tensor 1"
        ) from error
    found = {(call.heads, call.kv_heads) for call in recorder.calls}
    if found == {(config.heads, config.kv_heads)}:
        log.warning("the tensor parallel plan does not shard the attention, so every rank holds all heads")
        return True
    if found != {(config.heads // ranks, max(1, config.kv_heads // ranks))}:
        raise ConfigError(
            f"{config.architecture} cannot be sharded over {ranks} ranks: a rank would have {sorted(found)} "
            f"heads and KV heads of {config.heads} and {config.kv_heads}. Use --tensor 1"
        )
    return False

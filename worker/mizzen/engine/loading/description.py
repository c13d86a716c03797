# SPDX-License-Identifier: Apache-2.0
"""Describes a loaded engine, for gateways, metrics and the log."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mizzen.core.config import SchedulerConfig
from mizzen.engine.config import EngineOptions
from mizzen.engine.info import EngineInfo, log_loaded
from mizzen.engine.loading.host import reported_device_memory
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.layers.sharding import choose_expert_groups
from mizzen.models.config import ModelConfig


def describe_engine(
    options: EngineOptions,
    config: ModelConfig,
    scheduling: SchedulerConfig,
    phases: dict[str, float],
    embedding: torch.Tensor,
    format_bytes: Mapping[str, int],
    need: MemoryNeed,
    graph_bytes: int = 0,
    attention: tuple[str, str] = ("", ""),
) -> EngineInfo:
    """Return the description of a loaded engine, and log it.

    Args:
        options: Engine options.
        config: Configuration with which the model was built.
        scheduling: Configuration of the scheduler.
        phases: Duration in seconds of each start-up phase; all of them are over.
        embedding: The model's embedding, which has the dtype and the device of the model.
        format_bytes: Bytes of the weights, by format.
        need: Memory that KV and the largest step need.
        graph_bytes: Bytes that captured graphs hold.
        attention: Names of the attention backends for decode and prefill.
    """
    memory = reported_device_memory(embedding.device)
    info = EngineInfo(
        context_length=scheduling.capacity_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=scheduling.end_token_ids,
        page_size=scheduling.page_size,
        pages_total=scheduling.pages_total,
        weights_bytes=sum(format_bytes.values()),
        quantization=config.quantization.describe() if config.quantization.schemes else "",
        format_bytes=format_bytes,
        kv_bytes=scheduling.pages_total * scheduling.page_size * need.token_bytes,
        step_bytes=need.step_bytes,
        graph_bytes=graph_bytes,
        dtype=str(embedding.dtype).removeprefix("torch."),
        device=options.device,
        implementation=config.implementation,
        task=config.task,
        labels=config.labels,
        score_activation=config.score_activation,
        pooling=config.pooling,
        images=scheduling.image_capacity > 0,
        expert_groups=choose_expert_groups(config, options.tensor, options.expert) if config.experts else 0,
        attention=attention,
        device_bytes=memory.total,
        free_bytes=memory.free,
        phases=phases,
    )
    log_loaded(info)
    return info

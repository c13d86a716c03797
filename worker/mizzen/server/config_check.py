# SPDX-License-Identifier: Apache-2.0
"""Check an engine's configuration before any process starts.

Called by the supervisor and by `mizzen serve`.
"""

from __future__ import annotations

from pathlib import Path

from mizzen.engine.loading.validate import check_model, make_trace_folder
from mizzen.models.registry import read_config
from mizzen.server.config import EngineConfig
from mizzen.server.gpus import GpuSearch, check_gpus, find_problem
from mizzen.server.model_files import check_has_config, check_is_folder
from mizzen.server.nodes.group import tcp_endpoint
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.server.tracing.trace_export import check_tracing
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.endpoint import require_safe


def check_config(config: EngineConfig, *, loads_model: bool = True) -> None:
    """Check the model folder, trace folder, tracing, keys, endpoints and device of a configuration.

    Args:
        config: Configuration of the engine.
        loads_model: Whether the engine loads a model; a simulated engine needs no complete config.json.

    Raises:
        ValueError: a value is invalid; the message names the option or file and the allowed values.
    """
    check_is_folder(Path(config.model))
    if loads_model:
        check_has_config(Path(config.model))
    if config.tensor > 1:
        plan_memory_bytes(config)
    if loads_model:
        check_model(config, read_config(Path(config.model), config.model_implementation))
    if config.profile and not config.node_rank:
        make_trace_folder(Path(config.profile))
    check_tracing(config)
    keys = open_keys(config)
    require_safe(config.wire_bind, keys)
    if config.nodes > 1:
        require_safe(tcp_endpoint(config.ranks_address, config.ranks_port), keys)
        if config.node_rank:
            require_safe(tcp_endpoint(config.leader_address, config.ranks_port), keys)
    if loads_model and config.device == "cuda" and (problem := find_problem()):
        check_gpus(config.local_ranks, GpuSearch(0, problem))


def open_keys(config: EngineConfig) -> KeyFolder | None:
    """Return the configured CURVE keys, or None if --keys is not set.

    Raises:
        KeyFileError: a key file is missing or malformed; the message names it.
    """
    return KeyFolder(Path(config.keys), "engine") if config.keys else None

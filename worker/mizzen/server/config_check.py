"""What can be known to be wrong before anything is started."""

from __future__ import annotations

from pathlib import Path

from mizzen.engine.loading.validate import check_model, make_trace_folder
from mizzen.models.registry import read_config
from mizzen.server.config import EngineConfig
from mizzen.server.model_files import ModelFolderError
from mizzen.server.nodes.group import tcp_endpoint
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.wire.curve_keys import KeyFolder
from mizzen.wire.endpoint import require_safe


def check_config(config: EngineConfig, *, computes: bool = True) -> None:
    """Check what can be checked before anything is started.

    Args:
        config: What the engine is told.
        computes: Whether a model is loaded; where it is simulated, its config.json need not be one.

    Raises:
        ValueError: names the option or file and what would be right.
    """
    if not Path(config.model).is_dir():
        raise ModelFolderError(f"--model {config.model} is no folder")
    if config.tensor > 1:
        plan_memory_bytes(config)
    if computes:
        check_model(config, read_config(Path(config.model)))
    if config.profile and not config.node_rank:
        make_trace_folder(Path(config.profile))
    keys = open_keys(config)
    require_safe(config.wire_bind, keys)
    if config.nodes > 1:
        require_safe(tcp_endpoint(config.ranks_address, config.ranks_port), keys)
        if config.node_rank:
            require_safe(tcp_endpoint(config.leader_address, config.ranks_port), keys)


def open_keys(config: EngineConfig) -> KeyFolder | None:
    """Return the keys of a configuration, if it has some.

    Raises:
        KeyFileError: names the file that is missing or malformed.
    """
    return KeyFolder(Path(config.keys), "engine") if config.keys else None

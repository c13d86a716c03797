# SPDX-License-Identifier: Apache-2.0
"""Builds a model of Transformers without weights, on the meta device.

Only classes of the installed Transformers are used; code in the model's folder is never run.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend import attention

MIN_VERSION, TOO_NEW = (5, 10), (6,)
"""The range of versions whose internals this package uses: from the first, and below the second."""


def check_version() -> None:
    """Check the version of Transformers.

    Raises:
        ConfigError: it is too old or too new.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = transformers.__version__
    if not MIN_VERSION <= tuple(map(int, installed.split(".")[:2])) < TOO_NEW:
        oldest, limit = (".".join(map(str, release)) for release in (MIN_VERSION, TOO_NEW))
        raise ConfigError(
            f"--model-implementation transformers needs Transformers from {oldest} and below {limit}, not "
            f"{installed}: install mizzen[transformers]"
        )


def read_hf_config(folder: Path, architecture: str) -> Any:
    """Read a model folder's config.json into the configuration class of an architecture.

    Raises:
        ConfigError: Transformers has no such class, or it rejects the configuration.
    """
    known = find_class(architecture)
    try:
        config = known.config_class.from_pretrained(folder, local_files_only=True)
        if not isinstance(config.model_type, str):
            raise TypeError(f"model_type must be a text, not {config.model_type!r}")
        return config
    except Exception as error:  # a configuration class may reject values in any way
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{folder / 'config.json'}: Transformers {transformers.__version__} cannot read it: {reason}"
        ) from error


def find_class(architecture: str) -> Any:
    """Return Transformers' class for a name in `architectures`.

    Raises:
        ConfigError: Transformers has no such class or is too old, or the class cannot be served.
    """
    check_version()
    known = getattr(transformers, architecture, None)
    if not isinstance(known, type) or not issubclass(known, transformers.PreTrainedModel):
        raise ConfigError(
            f"architectures lists {architecture}, which is not a class of Transformers "
            f"{transformers.__version__}; code in the model's folder is not executed. Use an image with a "
            "newer Transformers, or another model"
        )
    if getattr(known, "_is_stateful", False):
        raise ConfigError(
            f"{architecture} cannot be served: it has recurrent layers, whose state is not in the KV cache. "
            "Use a model with attention only"
        )
    if not getattr(known, "_supports_attention_backend", False):
        raise ConfigError(
            f"{architecture} cannot be served: in Transformers {transformers.__version__} it does not use "
            "the attention interface (_supports_attention_backend). Use an image with a newer Transformers, "
            "or another model"
        )
    return known


def build_on_meta(hf_config: Any, architecture: str, dtype: torch.dtype) -> Any:
    """Build a model whose parameters are on the meta device, and whose buffers hold their initial values.

    Args:
        hf_config: Configuration; the model uses and changes it.
        architecture: Name of the model's class.
        dtype: Data type of the parameters.

    Returns:
        The causal language model of Transformers, in evaluation mode.

    Raises:
        ConfigError: the class is unknown or cannot be served.
    """
    attention.register()
    logging.set_verbosity_error()  # the engine's log has another format
    known = find_class(architecture)
    with suppress(Exception):  # some configurations require a number
        hf_config.pad_token_id = None  # a request may contain any token
    try:
        with torch.device("meta"):
            model = known._from_config(hf_config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION)
        initialize_buffers(model)
    except Exception as error:  # the constructor of a model may fail in any way
        raise ConfigError(f"{architecture} cannot be built by Transformers: {error}") from error
    return model.eval().requires_grad_(False)


def initialize_buffers(model: Any) -> None:
    """Give the buffers of a model on the meta device their initial values, on the CPU."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # Transformers then leaves it alone
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.no_grad():
        model.initialize_weights()

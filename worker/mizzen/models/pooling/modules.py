# SPDX-License-Identifier: Apache-2.0
"""Modules of a model of sentence-transformers: pooling, Dense layers and normalisation, from their files.

`modules.json` lists the modules; each has a folder with its configuration. Importing this module does not
import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mizzen.common.sentence_transformers import POOLING_FILE, selected_modes, supported_pooling
from mizzen.models.hf_fields import ConfigError, Fields

LIST = "modules.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
"""Supported modules in the order in which a model may list them, by the last part of their `type`."""
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Activations of Dense modules, by their classes of torch.nn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModule:
    """A Dense module: a linear layer and an activation that follow the pooling."""

    folder: str
    """Folder with the module's weights, within that of the model."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """One of `DENSE_ACTIVATIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """Modules that follow the transformer in a model of sentence-transformers."""

    pooling: str = ""
    """Pooling, a value of `Pooling` or the name of one that is not supported; empty if none is named."""
    dense: tuple[DenseModule, ...] = ()


def read_modules(folder: Path) -> SentenceModules:
    """Read the modules of a model folder; a folder without their files has none.

    Raises:
        ConfigError: a module is not supported, or its configuration is invalid; the message names it.
    """
    if not (folder / LIST).exists():
        stored = (folder / POOLING_FILE).exists()
        return SentenceModules(pooling=_read_pooling((folder / POOLING_FILE).parent) if stored else "")
    pooling, dense, order = "", [], 0
    for kind, path in _list_modules(folder):
        if kind not in KINDS or KINDS.index(kind) < order:
            rule = f"supported are {', '.join(KINDS)}, in this order"
            raise ConfigError(f"{folder / LIST}: the module {kind} is not supported here; {rule}")
        order = KINDS.index(kind)
        if kind == "Pooling":
            pooling = _read_pooling(folder / path)
        elif kind == "Dense":
            dense.append(_read_dense(folder, path))
    return SentenceModules(pooling=pooling, dense=tuple(dense))


def _list_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kinds of a model's modules and their folders within the model's, in their order.

    Raises:
        ConfigError: the file is invalid, or names a folder outside the model's.
    """
    source = folder / LIST
    try:
        entries = json.loads(source.read_bytes())
        modules = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error!r}") from error
    for _, path in modules:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{source} names the folder {path!r} outside the model's folder")
    return modules


def _read_pooling(folder: Path) -> str:
    """Return the pooling that the configuration of a pooling module selects, or its name if unsupported.

    Several poolings, whose results would be concatenated, are not supported; their names are joined by +.
    """
    config = _load_fields(folder).values
    names = (name.removeprefix("pooling_mode_") for name in selected_modes(config))
    return supported_pooling(config) or "+".join(names) or "none"


def _load_fields(folder: Path) -> Fields:
    """Return the configuration of a module.

    Raises:
        ConfigError: it is missing or invalid.
    """
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder}/config.json is missing, although {LIST} names this module: fetch the model again"
        )
    return Fields.load(folder)


def _read_dense(folder: Path, path: str) -> DenseModule:
    fields = _load_fields(folder / path)
    name = str(fields.values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    module, _, activation = name.rpartition(".")
    if not module.startswith("torch.nn") or activation not in DENSE_ACTIVATIONS:
        supported = ", ".join(f"torch.nn.{kind}" for kind in DENSE_ACTIVATIONS)
        raise fields.error("activation_function", f"must name one of {supported}")
    for key in ("module_input_name", "module_output_name"):
        if fields.values.get(key) not in (None, "sentence_embedding"):
            raise fields.error(key, "must be sentence_embedding")
    return DenseModule(
        folder=path,
        inputs=fields.integer("in_features"),
        outputs=fields.integer("out_features"),
        bias=fields.flag("bias", True),
        activation=activation,
    )

# SPDX-License-Identifier: Apache-2.0
"""Writes quantized checkpoints of tiny random twins, and reads them back as exact float32 weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from family_twins import save_twin
from weight_format import WeightFormat

FILE = "model.safetensors"
EMBEDDINGS = re.compile(r"(^|\.)(embed\w*|wte|wpe)\.weight$")
PART_FACTORS = {"q_proj": 1.0, "k_proj": 10.0, "v_proj": 0.01, "gate_proj": 0.01, "up_proj": 10.0}
"""Factors of weights of layers that are merged when they are loaded; their scales differ by up to 1000."""

SOURCE_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
"""Sizes of a twin whose layers all formats and up to four ranks can divide."""


def save_source(folder: Path, **sizes: Any) -> Path:
    """Save a tiny Granite with biases in its projections and with an untied head; return the folder.

    `sizes` replace some of `SOURCE_SIZES`.
    """
    save_twin(folder, "granite-biases", **{**SOURCE_SIZES, **sizes})
    return folder


@dataclass(frozen=True, slots=True)
class QuantizedTwin:
    """A quantized checkpoint."""

    folder: Path
    format: WeightFormat
    layers: tuple[str, ...]
    """Names of the quantized linear layers, without `.weight`."""

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer by the last part of their names, including a bias."""
        return select_layer(load_file(self.folder / FILE), layer)

    def dequantize(self) -> dict[str, torch.Tensor]:
        """Return the float32 weights [rows, columns] of all quantized layers, by the name of the layer."""
        stored = load_file(self.folder / FILE)
        return {
            layer: torch.from_numpy(np.ascontiguousarray(self.format.dequantize(select_layer(stored, layer))))
            for layer in self.layers
        }

    def save_dequantized(self, folder: Path) -> None:
        """Write the checkpoint with the dequantized weights, as an unquantized model, into a new folder."""
        folder.mkdir()
        config = json.loads((self.folder / "config.json").read_text())
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config))
        prefixes = tuple(f"{layer}." for layer in self.layers)
        stored = load_file(self.folder / FILE)
        kept = {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}
        weights = {f"{layer}.weight": weight for layer, weight in self.dequantize().items()}
        biases = {name: stored[name] for layer in self.layers if (name := f"{layer}.bias") in stored}
        save_file(kept | weights | biases, folder / FILE, {"format": "pt"})

    def describe(self, ignored: tuple[str, ...]) -> None:
        """Replace the description of the format by one that names other unquantized layers."""
        write_config(self.folder, self.format, ignored)

    def edit(self, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Replace a tensor of the checkpoint by `change(tensor)`, or remove it if that is None."""
        stored = load_file(self.folder / FILE)
        if (changed := change(stored.pop(name))) is not None:
            stored[name] = changed
        save_file(stored, self.folder / FILE, {"format": "pt"})

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor to the checkpoint."""
        save_file(load_file(self.folder / FILE) | {name: tensor}, self.folder / FILE, {"format": "pt"})

    def set_scale(self, layer: str, scale: float, *, index: int = 0) -> None:
        """Set one scale of a layer's weight, at a flat index, such as 0 or 1e-30 for a dead output row."""

        def change(scales: torch.Tensor) -> torch.Tensor:
            scales.view(-1)[index] = scale
            return scales

        self.edit(f"{layer}.{self.format.scale_name}", change)

    def set_weight_code(self, layer: str, code: int, *, index: int = 0) -> None:
        """Set one 8-bit code of a layer's weight, at a flat index, such as 0x7f for e4m3's NaN."""

        def change(codes: torch.Tensor) -> torch.Tensor:
            codes.view(torch.uint8).view(-1)[index] = code
            return codes

        self.edit(f"{layer}.weight", change)

    def dequantize_into(self, model: Any) -> Any:
        """Replace weights of the unquantized twin, a model of Transformers, by the dequantized ones."""
        with torch.no_grad():
            for layer, weight in self.dequantize().items():
                model.get_submodule(layer).weight.copy_(weight)
        return model


def select_layer(tensors: Mapping[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with a layer's name, by the rest of their names."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def quantize_twin(
    source: Path,
    folder: Path,
    weight_format: WeightFormat,
    *,
    ignored: tuple[str, ...] = ("lm_head",),
    part_factors: Mapping[str, float] | None = None,
    seed: int = 0,
) -> QuantizedTwin:
    """Write a quantized copy of a checkpoint.

    All linear layers but the ignored ones are quantized, that is, all matrices but embeddings; the other
    tensors are copied.

    Args:
        source: Model folder with one safetensors file of unquantized weights.
        folder: Folder to create.
        weight_format: Format of the weights.
        ignored: Full names of layers that are not quantized.
        part_factors: Factors of weights before they are quantized, by the last part of the layer's name, as
            in `PART_FACTORS`.
        seed: Seed of orders of columns and of static scales.
    """
    shutil.copytree(source, folder)
    rng, stored, layers = np.random.default_rng(seed), {}, []
    for name, tensor in load_file(source / FILE).items():
        layer = name.removesuffix(".weight")
        if tensor.ndim != 2 or EMBEDDINGS.search(name) or layer in ignored:
            stored[name] = tensor
            continue
        own_name = layer.rpartition(".")[2]
        weight = tensor.float() * (part_factors or {}).get(own_name, 1.0)
        layers.append(layer)
        parts = weight_format.quantize(weight.numpy(), rng)
        for kind in weight_format.kv_scales:
            if own_name == f"{kind[0]}_proj":
                parts[kind] = torch.tensor(rng.uniform(0.01, 0.05), dtype=torch.float32)
        stored |= {f"{layer}.{part}": value for part, value in parts.items()}
    save_file(stored, folder / FILE, {"format": "pt"})
    write_config(folder, weight_format, ignored)
    return QuantizedTwin(folder, weight_format, tuple(layers))


def write_config(folder: Path, weight_format: WeightFormat, ignored: tuple[str, ...]) -> None:
    """Write the description of the format into config.json or, if the format uses one, into another file."""
    path = folder / weight_format.config_file
    description = weight_format.config(ignored)
    if path.name == "config.json":
        description = json.loads(path.read_text()) | {"quantization_config": description}
    path.write_text(json.dumps(description, indent=2))

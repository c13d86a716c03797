# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers in checkpoints of their own, loaded by any rank, without a model around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized import choose_linear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.quantized.stored_layer import IGNORED, ZEROS
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.hf_fields import Fields
from mizzen.parallel.collectives import SingleRank
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization
from mizzen.weights.load import load_checkpoint
from weight_format import WeightFormat

Change = Callable[[dict[str, torch.Tensor]], None]
"""Function that changes the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """Linear layers with random weights in a checkpoint."""

    folder: Path
    format: WeightFormat
    weights: Mapping[str, torch.Tensor]
    """Exact float32 weights [rows, columns] by the name of the layer."""

    def context(self, rank: int = 0, size: int = 1) -> BuildContext:
        """Return the context in which a rank builds layers."""
        collectives = SingleRank()
        collectives.rank, collectives.size = rank, size  # type: ignore[assignment]
        description = self.format.config(())
        values = {
            MODELOPT_FILE if self.format.config_file == MODELOPT_FILE else "quantization_config": description
        }
        return BuildContext(
            device=torch.device("cpu"),
            dtype=torch.float32,
            mesh=Mesh(Axis(rank, size)),
            make_linear=choose_linear(read_quantization(Fields(values)), UnquantizedLinear),
            collectives=collectives,
        )

    def load(self, layer: MergedColumnParallelLinear | RowParallelLinear) -> DequantizedLinear:
        """Load a layer and prepare it."""
        with torch.inference_mode():
            load_checkpoint(
                self.folder,
                layer.targets(),
                tied=False,
                progress=lambda done, total: None,
                ignored=(IGNORED,),
                ignored_zeros=(ZEROS,),
            )
            layer.method.finish()
        assert isinstance(layer.method, DequantizedLinear)
        return layer.method

    def load_rows(self, rank: int = 0, size: int = 1, *, bias: bool = False) -> DequantizedLinear:
        """Load all layers as one merged layer whose rows are divided among ranks."""
        build, names = self.context(rank, size), list(self.weights)
        totals = [len(weight) for weight in self.weights.values()]
        shards = [build.mesh.tensor.shard(total, "rows") for total in totals]
        columns = next(iter(self.weights.values())).shape[1]
        return self.load(MergedColumnParallelLinear(build, name_rows(names, totals, shards), columns, bias))

    def load_columns(self, rank: int = 0, size: int = 1, *, bias: bool = False) -> DequantizedLinear:
        """Load the only layer, whose columns are divided among ranks."""
        ((name, weight),) = self.weights.items()
        return self.load(RowParallelLinear(self.context(rank, size), name, *weight.shape, bias))


def write_layers(
    folder: Path,
    weight_format: WeightFormat,
    shapes: Mapping[str, tuple[int, int]],
    factors: Mapping[str, float] | None = None,
    change: Change | None = None,
) -> LayerFiles:
    """Write layers with random weights.

    Args:
        folder: Folder of the checkpoint; it is created.
        weight_format: Format of all layers.
        shapes: Rows and columns of each layer by its name.
        factors: Factors of the weights of layers.
        change: Changes the stored tensors; the exact weights are those of the unchanged tensors.
    """
    rng, stored, weights = np.random.default_rng(0), {}, {}
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32) * np.float32((factors or {}).get(name, 1.0))
        tensors = weight_format.quantize(weight, rng)
        weights[name] = torch.from_numpy(np.ascontiguousarray(weight_format.dequantize(tensors)))
        stored |= {f"{name}.{part}": value.contiguous() for part, value in tensors.items()}
    if change is not None:
        change(stored)
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return LayerFiles(folder, weight_format, weights)


def restore(method: DequantizedLinear, columns: int) -> torch.Tensor:
    """Return a layer's float32 weight [rows, columns] with the columns in the order of the inputs."""
    weight = method.weight
    if weight.order is None:
        return weight.dequantize()
    restored = torch.zeros(weight.rows, columns)
    return restored.index_add_(1, weight.order, weight.dequantize())

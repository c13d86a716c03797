# SPDX-License-Identifier: Apache-2.0
"""`PooledOutput`: the layers that follow the pooled hidden state, in float32.

These are either the classification head of a `*ForSequenceClassification` model, or the Dense modules of a
model of sentence-transformers. They are small, so every rank holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from mizzen.layers.weight_target import WeightTarget
from mizzen.models.pooling.modules import DenseModule
from mizzen.weights.checkpoint_files import SINGLE, WeightsError

SCORE = "score.weight"
"""Name of the tensor of a classification head."""
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
"""Activations of Dense modules, by their names in `mizzen.models.pooling.modules.DENSE_ACTIVATIONS`."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Weights of a `DenseModule` on the device."""

    weight: torch.Tensor
    """Weights, float32 [outputs, inputs]."""
    bias: torch.Tensor | None
    """Biases, float32 [outputs]."""
    activation: str
    """A key of `ACTIVATIONS`."""

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, outputs] for vectors, float32 [n, inputs]."""
        return ACTIVATIONS[self.activation](F.linear(vectors, self.weight, self.bias))


class PooledOutput:
    """Layers that map pooled hidden states to embeddings and to logits of labels."""

    def __init__(self, device: torch.device, labels: int = 0, hidden: int = 0) -> None:
        """Allocate the classification head for `labels` labels and states of `hidden` elements.

        Without labels there is no head.
        """
        self.score = torch.empty(labels, hidden, dtype=torch.float32, device=device)
        self.dense: Sequence[DenseLayer] = ()
        """Dense modules of an embedding model, which are loaded after the model."""

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the classification head, if there is one."""
        labels, hidden = self.score.shape
        if labels:
            yield WeightTarget(
                name=SCORE,
                shape=(labels, hidden),
                shard=(slice(0, labels), slice(0, hidden)),
                destination=self.score,
            )

    def embed(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [n, size] of pooled hidden states, float32 [n, hidden]."""
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors

    def classify(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, labels] of pooled hidden states, float32 [n, hidden]."""
        return F.linear(vectors, self.score)


def load_dense_layers(
    folder: Path, modules: Sequence[DenseModule], inputs: int, device: torch.device
) -> list[DenseLayer]:
    """Load the Dense modules of an embedding model, in float32.

    Args:
        folder: Folder of the model.
        modules: The modules, in the order in which they run.
        inputs: Number of elements of the pooled hidden state.
        device: Device of the model.

    Raises:
        WeightsError: a file is missing or cannot be read, or a tensor is missing or has a wrong shape.
    """
    layers: list[DenseLayer] = []
    for module in modules:
        path = folder / module.folder / SINGLE
        if module.inputs != inputs:
            raise WeightsError(
                f"{path.parent}: in_features is {module.inputs}, but its inputs have {inputs} elements"
            )
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        shapes = {"linear.weight": (module.outputs, inputs)}
        shapes |= {"linear.bias": (module.outputs,)} if module.bias else {}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != shapes:
            raise WeightsError(f"{path}: the shapes of the tensors are {found}, but must be {shapes}")
        weights = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        layers.append(DenseLayer(weights["linear.weight"], weights.get("linear.bias"), module.activation))
        inputs = module.outputs
    return layers

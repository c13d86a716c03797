# SPDX-License-Identifier: Apache-2.0
"""Classification heads of encoders: from the hidden states of a prompt to one logit for each label."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import LinearKind, LinearMethod, LinearPart
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.description import EncoderConfig, HeadConfig
from mizzen.models.encoders.layer import make_layer_norm


class ClassificationHead:
    """Two linear layers, with tanh or with an activation function and a norm between them."""

    def __init__(
        self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig, head: HeadConfig
    ) -> None:
        hidden = config.hidden_size
        self.mean = head.mean
        self.dense = make_linear(build, head.dense, hidden, hidden, head.dense_bias)
        self.activation = ActivationFunction(build, head.activation) if head.activation else torch.tanh
        self.norm = make_layer_norm(build, config, encoder, head.norm) if head.norm else None
        self.classifier = make_linear(build, head.classifier, len(config.labels), hidden, True)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.dense.targets()
        if self.norm is not None:
            yield from self.norm.targets()
        yield from self.classifier.targets()

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the logits [prompts, labels] for first tokens or means [prompts, hidden]."""
        x = self.activation(self.dense.apply(pooled))
        return self.classifier.apply(x if self.norm is None else self.norm(x))


def make_linear(build: BuildContext, name: str, rows: int, columns: int, bias: bool) -> LinearMethod:
    """Make a linear layer from `columns` inputs to `rows` outputs."""
    part = LinearPart(
        name=name, first_row=0, rows=slice(0, rows), columns=slice(0, columns), shape=(rows, columns)
    )
    return build.linear(LinearKind.HEAD, (part,), rows=rows, columns=columns, bias=bias)


def make_head(build: BuildContext, config: ModelConfig, encoder: EncoderConfig) -> ClassificationHead | None:
    """Make the classification head of an encoder; None for an embedding model."""
    return None if encoder.head is None else ClassificationHead(build, config, encoder, encoder.head)

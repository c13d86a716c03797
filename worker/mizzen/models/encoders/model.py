# SPDX-License-Identifier: Apache-2.0
"""The encoder: embeddings of tokens, positions and token types, then layers with bidirectional attention.

`mizzen.engine.encoders.executor` runs it on whole prompts, which form one batch without padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import TokenEmbedding
from mizzen.layers.rope import RotaryEmbedding
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.encoders.head import make_head
from mizzen.models.encoders.layer import Attend, EncoderLayer, make_layer_norm
from mizzen.models.pooling.output import PooledOutput

OLD_NORM_NAMES = {"weight": "gamma", "bias": "beta"}
"""Names that the parameters of LayerNorms have in checkpoints converted from TensorFlow."""


class EncoderModel:
    """Transformer with bidirectional attention, which maps prompts to hidden states."""

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig) -> None:
        self.config, self.encoder = config, encoder
        self.ignored: Sequence[re.Pattern[str]] = [re.compile(name) for name in config.ignored_tensors]
        """Patterns of the names of checkpoint tensors that the model does not need."""
        names, hidden = encoder.names, config.hidden_size
        self.embedding = TokenEmbedding(build, names.prefix + names.embedding, config.vocab_size, hidden)
        self.positions = self._table(build, names.positions, encoder.positions)
        self.token_types = self._table(build, names.token_types, encoder.token_types)
        self.embedding_norm = make_layer_norm(build, config, encoder, names.prefix + names.embedding_norm)
        self.layers = [EncoderLayer(build, config, encoder, layer) for layer in range(config.layers)]
        self.final_norm = (
            make_layer_norm(build, config, encoder, names.prefix + names.final_norm)
            if names.final_norm
            else None
        )
        self.rotaries = [
            RotaryEmbedding(rope, config.head_dim, build.dtype, build.device) for rope in config.ropes
        ]
        self.head = make_head(build, config, encoder)
        self.pooled = PooledOutput(build.device)
        """Layers of an embedding model that follow the pooled hidden state."""

    def _table(self, build: BuildContext, name: str, rows: int) -> TokenEmbedding | None:
        if not rows:
            return None
        return TokenEmbedding(build, self.encoder.names.prefix + name, rows, self.config.hidden_size)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
        for table in (self.embedding, self.positions, self.token_types):
            if table is not None:
                yield from table.targets()
        yield from map(add_old_norm_name, self.embedding_norm.targets())
        for layer in self.layers:
            yield from map(add_old_norm_name, layer.targets())
        if self.final_norm is not None:
            yield from self.final_norm.targets()
        if self.head is not None:
            yield from self.head.targets()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layers over a batch of whole prompts.

        Args:
            tokens: Token ids of all prompts, one after the other, int64 [tokens].
            positions: Position of each token: the row of learned positions, or else its place in the prompt,
                int64 [tokens].
            token_types: Type of each token, int64 [tokens]; None if all types are 0.
            attend: Attention within each prompt.

        Returns:
            The hidden states [tokens, hidden] in the model's dtype, after the last norm.
        """
        x = self.embedding(tokens)
        if self.token_types is not None:
            x += self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        if self.positions is not None:
            x = self.embedding_norm.normalise_sum(self.positions(positions), x)
        else:
            x = self.embedding_norm(x)
        angles = [rotary.angles(positions) for rotary in self.rotaries]
        for index, layer in enumerate(self.layers):
            x = layer(x, attend, angles[self.config.rope_index(index)] if angles else None)
        return x if self.final_norm is None else self.final_norm(x)


def add_old_norm_name(target: WeightTarget) -> WeightTarget:
    """Return the target with the name that a LayerNorm's tensor may have in an old checkpoint."""
    stem, _, parameter = target.name.rpartition(".")
    if not stem.endswith("LayerNorm"):
        return target
    return replace(target, other_names=(f"{stem}.{OLD_NORM_NAMES[parameter]}",))

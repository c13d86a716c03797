"""Whether a model can be shared by a number of ranks."""

from __future__ import annotations

from mizzen.layers.sharding import Axis
from mizzen.models.config import ModelConfig


def check_shardable(config: ModelConfig, ranks: int) -> None:
    """Check that every rank gets an equal part of each layer.

    Key-value heads that are fewer than ranks are held by several; the vocabulary is padded.

    Raises:
        ValueError: names what does not divide, the numbers, and those that would do.
    """
    axis = Axis(0, ranks)
    axis.shard(config.heads, "num_attention_heads")
    axis.replicated_shard(config.kv_heads, "num_key_value_heads")
    axis.shard(config.intermediate_size, "intermediate_size")

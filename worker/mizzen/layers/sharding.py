"""Sharding of a model over the ranks of its tensor axis.

Layers ask an `Axis` for their shard; the engine checks before loading that every layer can be sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mizzen.models.config import ModelConfig

SUGGESTED_SIZES = (1, 2, 4, 8)
"""Numbers of ranks that error messages suggest."""


def suggest_sizes(total: int) -> str:
    """Return the advice which numbers of ranks divide `total`."""
    return f"use --tensor {' or '.join(str(size) for size in SUGGESTED_SIZES if not total % size)}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of the mesh: this rank's index on it, and its size."""

    rank: int = 0
    size: int = 1

    def shard(self, total: int, what: str) -> slice:
        """Return this rank's equal shard of `total` items.

        Raises:
            ValueError: `total` is not a multiple of the ranks; names `what` and the numbers that divide it.
        """
        if total % self.size:
            raise ValueError(
                f"{what} ({total}) must be a multiple of the tensor ranks ({self.size}): "
                f"{suggest_sizes(total)}"
            )
        count = total // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def replicated_shard(self, total: int, what: str) -> slice:
        """Return this rank's shard of `total` items; if ranks outnumber items, several ranks hold the same
        one.

        Raises:
            ValueError: neither number divides the other; names `what` and the numbers that would do.
        """
        if total >= self.size:
            return self.shard(total, what)
        if self.size % total:
            raise ValueError(
                f"{what} ({total}) must divide the tensor ranks ({self.size}), being fewer: "
                f"{suggest_sizes(total)}"
            )
        index = self.rank // (self.size // total)
        return slice(index, index + 1)

    def padded_shard(self, total: int, multiple: int) -> tuple[int, slice]:
        """Return the padded number of items per rank, and this rank's shard of `total` items.

        The padded number is the same on all ranks, and a multiple of `multiple` if there are several ranks;
        the last ranks may hold fewer items, or none.
        """
        if self.size == 1:
            return total, slice(0, total)
        padded = -(-total // (self.size * multiple)) * multiple
        start = min(self.rank * padded, total)
        return padded, slice(start, min(start + padded, total))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The named axes; further ones (pipeline, experts, data) join `tensor` here."""

    tensor: Axis = field(default_factory=Axis)


def check_shardable(config: ModelConfig, ranks: int) -> None:
    """Check that every rank gets an equal shard of each layer.

    KV heads that are fewer than the ranks are replicated; the vocabulary is padded.

    Raises:
        ValueError: names the field that does not divide, the numbers, and the alternatives.
    """
    axis = Axis(0, ranks)
    axis.shard(config.heads, "num_attention_heads")
    axis.replicated_shard(config.kv_heads, "num_key_value_heads")
    axis.shard(config.intermediate_size, "intermediate_size")

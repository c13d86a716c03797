# SPDX-License-Identifier: Apache-2.0
"""Sharding of a model over the ranks of its tensor axis.

Layers ask an `Axis` for their shard; the engine checks before loading that every layer can be sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mizzen.layers.quantized.shard_check import find_divided_byte, find_divided_expert, find_divided_word
from mizzen.models.config import ModelConfig

ROW_MULTIPLE = 8
"""If there are several ranks, the number of vocabulary rows of each rank is padded to a multiple of this
number; kernels need this alignment."""
SUGGESTED_SIZES = (1, 2, 4, 8)
"""Numbers of ranks that error messages suggest."""


def suggest_sizes(total: int) -> str:
    """Return advice for an error message: the suggested numbers of ranks that divide `total`."""
    return f"use --tensor {' or '.join(str(size) for size in SUGGESTED_SIZES if not total % size)}"


class IndivisibleError(ValueError):
    """Items cannot be sharded equally.

    Attributes:
        problem: the message without the numbers of ranks that it suggests.
        total: number of the items.
    """

    def __init__(self, problem: str, total: int) -> None:
        super().__init__(problem, total)
        self.problem, self.total = problem, total

    def __str__(self) -> str:
        return f"{self.problem}: {suggest_sizes(self.total)}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh: this rank's index on the axis, and the number of ranks along it."""

    rank: int = 0
    size: int = 1

    def shard(self, total: int, name: str) -> slice:
        """Return this rank's equal shard of `total` items; `name` names the items in the error.

        Raises:
            IndivisibleError: `total` is not a multiple of the number of ranks; the message suggests other
                numbers of ranks.
        """
        if total % self.size:
            raise IndivisibleError(
                f"{name} ({total}) must be a multiple of the tensor ranks ({self.size})", total
            )
        count = total // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def replicated_shard(self, total: int, name: str) -> slice:
        """Return this rank's shard of `total` items; `name` names the items in the error.

        With fewer items than ranks, several ranks hold the same item.

        Raises:
            IndivisibleError: neither the number of items nor the number of ranks divides the other; the
                message suggests other numbers of ranks.
        """
        if total >= self.size:
            return self.shard(total, name)
        if self.size % total:
            raise IndivisibleError(
                f"{name} ({total}), being fewer than the tensor ranks ({self.size}), must divide them", total
            )
        index = self.rank // (self.size // total)
        return slice(index, index + 1)

    def padded_shard(self, total: int, multiple: int) -> tuple[int, slice]:
        """Return the padded number of items per rank, and this rank's shard of `total` items.

        The padded number is the same on all ranks; with several ranks, it is a multiple of `multiple`. The
        last ranks may hold fewer items than that, or no items.
        """
        if self.size == 1:
            return total, slice(0, total)
        padded = -(-total // (self.size * multiple)) * multiple
        start = min(self.rank * padded, total)
        return padded, slice(start, min(start + padded, total))

    def vocabulary_shard(self, total: int) -> tuple[int, slice]:
        """Return the padded number of vocabulary rows per rank, and this rank's shard of `total` tokens."""
        return self.padded_shard(total, ROW_MULTIPLE)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes along which a model is sharded over ranks.

    The experts of mixtures are on a grid of the same ranks: `expert_groups` groups of consecutive ranks hold
    different experts, and the ranks of a group hold different inner elements of the same experts.
    """

    tensor: Axis = field(default_factory=Axis)
    expert_groups: int = 1

    @property
    def expert(self) -> Axis:
        """Axis along which experts are divided."""
        return Axis(self.tensor.rank // self.expert_width.size, self.expert_groups)

    @property
    def expert_width(self) -> Axis:
        """Axis along which the inner elements of each expert are divided."""
        size = self.tensor.size // self.expert_groups
        return Axis(self.tensor.rank % size, size)


def check_shardable(config: ModelConfig, ranks: int, expert: int | None = None) -> None:
    """Check that each layer of a model can be sharded equally over `ranks` ranks.

    Layers of experts cannot if Transformers implements them, because its plans are not followed there. With
    fewer KV heads than ranks, KV heads are replicated. The vocabulary may have any size: it is padded.

    Args:
        config: Configuration of the model.
        ranks: Number of ranks.
        expert: Wanted number of groups of ranks with different experts; None to derive it.

    Raises:
        ValueError: a size cannot be sharded equally; the message names the config field, and suggests numbers
            of ranks with which all layers can be sharded.
    """
    if config.encoder is not None and ranks > 1:
        raise ValueError("encoders need --tensor 1: use several engines for more throughput")
    if config.expert_width and ranks > 1:
        raise ValueError("mixtures of experts that run through Transformers need --tensor 1")
    if problem := _find_problem(config, ranks):
        possible = [str(size) for size in SUGGESTED_SIZES if not _find_problem(config, size)]
        raise ValueError(f"{problem}: use --tensor {' or '.join(possible)}")
    choose_expert_groups(config, ranks, expert)


def choose_expert_groups(config: ModelConfig, ranks: int, wanted: int | None = None) -> int:
    """Return the number of groups of ranks with different experts; 1 if every rank has a part of each.

    Args:
        config: Configuration of the model.
        ranks: Number of ranks.
        wanted: Wanted number; by default the smallest with which the experts can be sharded equally.

    Raises:
        ValueError: the experts cannot be sharded so; the message gives the numbers.
    """
    if config.experts is None:
        return 1
    possible = [groups for groups in range(1, ranks + 1) if not _find_expert_problem(config, ranks, groups)]
    if not possible:
        raise ValueError(_find_mixture_problem(config, ranks))
    if wanted is None or wanted in possible:
        return wanted or possible[0]
    problem = _find_expert_problem(config, ranks, wanted)
    sizes = " or ".join(str(groups) for groups in possible)
    raise ValueError(f"--expert {wanted} is not possible, because {problem}: use --expert {sizes}")


def _find_problem(config: ModelConfig, ranks: int) -> str:
    """Return which size cannot be sharded equally over `ranks` ranks; empty if all can."""
    try:
        _check_sizes(config, ranks)
    except IndivisibleError as error:
        return error.problem
    return find_divided_word(config, ranks) or _find_mixture_problem(config, ranks)


def _find_mixture_problem(config: ModelConfig, ranks: int) -> str:
    """Return why neither the width nor the number of the experts can be sharded; empty if one can."""
    problems = [_find_expert_problem(config, ranks, groups) for groups in range(1, ranks + 1)]
    if not all(problems):
        return ""
    return f"{problems[0]}, or {problems[-1]}" if ranks > 1 else problems[0]


def _find_expert_problem(config: ModelConfig, ranks: int, groups: int) -> str:
    """Return why `groups` groups of ranks cannot hold different experts; empty if they can.

    The ranks of a group divide the width of its experts.
    """
    experts = config.experts
    if experts is None:
        return ""
    if ranks % groups:
        return f"the tensor ranks ({ranks}) must be a multiple of the expert groups ({groups})"
    if experts.count % groups:
        return f"{experts.count_field} ({experts.count}) must be a multiple of the expert groups ({groups})"
    width, owners = ranks // groups, "tensor ranks" if groups == 1 else "ranks of an expert group"
    if experts.width % width:
        return f"{experts.width_field} ({experts.width}) must be a multiple of the {owners} ({width})"
    return find_divided_expert(config, width, owners) or find_divided_byte(config, width, owners)


def _check_sizes(config: ModelConfig, ranks: int) -> None:
    axis = Axis(0, ranks)
    axis.shard(config.heads, "num_attention_heads")
    axis.replicated_shard(config.kv_heads, "num_key_value_heads")
    experts = config.experts
    if experts is None or not all(experts.layers):
        axis.shard(config.intermediate_size, "intermediate_size")
    if experts is not None:
        axis.shard(experts.shared_width, experts.shared_field)

# SPDX-License-Identifier: Apache-2.0
"""Description of the mixtures of experts in a model's layers, by data.

A family's config reader fills in an `ExpertsConfig`, and `mizzen.layers.experts` builds layers from it.
Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from mizzen.models.hf_fields import Fields


class Scoring(enum.StrEnum):
    """Function that turns the router's logits into scores of the experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts. Softmax over the chosen experts alone is the same as this, renormalised."""
    SIGMOID = "sigmoid"
    """Sigmoid of each logit by itself."""
    SPARSEMIXER = "sparsemixer"
    """SparseMixer at inference (arXiv 2409.12136): experts are chosen by their logits, in turn. The
    weight of each is its share in the softmax over those remaining experts whose logits are similar."""


class ExpertLayout(enum.StrEnum):
    """Layout of the experts' tensors in a checkpoint; `width` is the number of an expert's inner elements."""

    SEPARATE = "separate"
    """Each expert is stored in three tensors: gate, up [width, hidden] and down [hidden, width]."""
    STACKED = "stacked"
    """All experts share two tensors: gate and up [experts, 2 * width, hidden], and down
    [experts, hidden, width]."""
    TRANSPOSED = "transposed"
    """All experts share two tensors: gate and up [experts, hidden, 2 * width], and down
    [experts, width, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a mixture's tensors in a checkpoint.

    Names of the router, the experts and the shared expert begin behind that of the block. The suffix
    `.weight` is left out, except in names that do not always have it.
    """

    block: str = "mlp"
    """Name of the feed-forward block in layers with experts."""
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    """Name of the list of experts, if each expert is stored in separate tensors."""
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    """Names of an expert's gate and up projections."""
    down: str = "down_proj"
    stacked_gate_up: str = "experts.gate_up_proj"
    """Full name of the tensor that holds gate and up of all experts."""
    stacked_down: str = "experts.down_proj"
    """Full name of the tensor that holds the down projections of all experts."""
    stacked_gate_up_bias: str = "experts.gate_up_proj_bias"
    stacked_down_bias: str = "experts.down_proj_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts in a model's layers.

    For every token, a router scores all experts and chooses the `per_token` best. Their outputs are weighted
    with their scores and summed.
    """

    count: int
    """Number of experts in each layer that has any."""
    count_field: str = "num_experts"
    """Field of config.json with that number, for error messages."""
    per_token: int
    """Number of experts that a token runs through."""
    width: int
    """Number of inner elements of an expert."""
    width_field: str = "moe_intermediate_size"
    """Field of config.json with the width, for error messages."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have a dense feed-forward block."""
    scoring: Scoring = Scoring.SOFTMAX
    correction_bias: bool = False
    """Whether a learned bias of each expert is added to its score for the choice, but not for the weight."""
    correction_shape: tuple[int, ...] = ()
    """Dimensions of the bias in checkpoints, before that of the experts."""
    groups: int = 1
    """Number of groups of consecutive experts. A group's score is the sum of its two best experts' scores."""
    top_groups: int = 1
    """Number of the best groups, from which alone experts are chosen."""
    renormalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    sum_floor: float = 1e-20
    """Lower bound of that sum."""
    scale: float = 1.0
    """Factor of the weights."""
    jitter: float = 0.01
    """Half the largest relative difference of logits that are similar, in `SPARSEMIXER`."""
    float32_router: bool = False
    """Whether the router's weights are kept in float32 instead of the model's data type."""
    router_bias: bool = False
    """Whether a learned bias of each expert is added to its logit, for the choice and for the weight."""
    biases: bool = False
    """Whether the gate, up and down projections of the experts have biases."""
    shared_width: int = 0
    """Number of inner elements of the expert that all tokens run through; 0 without such an expert."""
    shared_field: str = "moe_intermediate_size"
    """Field of config.json with that number, for error messages."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a learned gate."""
    names: ExpertNames = field(default_factory=ExpertNames)
    layout: ExpertLayout = ExpertLayout.SEPARATE
    interleaved: bool = False
    """Whether gate and up alternate in tensors of all experts, from gate on; the layout is `TRANSPOSED`."""

    @property
    def active_width(self) -> int:
        """Number of inner elements of all experts together that one token runs through."""
        return self.per_token * self.width + self.shared_width

    def gate_up_layers(self, prefix: str) -> tuple[str, ...]:
        """Return the names of the gate and up layers of all experts, without `.weight`.

        `prefix` is the beginning of the names of a block's tensors. Layers that share a tensor have one name.
        """
        names = self.names
        if self.layout is not ExpertLayout.SEPARATE:
            return (prefix + names.stacked_gate_up.removesuffix(".weight"),)
        experts = (f"{prefix}{names.experts}.{expert}." for expert in range(self.count))
        return tuple(expert + name for expert in experts for name in names.gate_up)

    def down_layers(self, prefix: str) -> tuple[str, ...]:
        """Return the names of the down layers of all experts; see `gate_up_layers`."""
        names = self.names
        if self.layout is not ExpertLayout.SEPARATE:
            return (prefix + names.stacked_down.removesuffix(".weight"),)
        return tuple(f"{prefix}{names.experts}.{expert}.{names.down}" for expert in range(self.count))


MAX_EXPERTS = 4096
"""Largest number of experts of a layer, so that lists of their names stay short."""
PER_TOKEN = ("num_experts_per_tok", "moe_k")


def check_experts(fields: Fields, experts: ExpertsConfig, *, count: str) -> ExpertsConfig:
    """Check the numbers of experts and groups, and return the configuration with the name `count`.

    Args:
        fields: Fields of config.json.
        experts: Configuration that was read from them.
        count: Name of the field with the number of experts.

    Raises:
        ConfigError: a number does not suit the others; the message names the field.
    """
    if experts.count > MAX_EXPERTS:
        raise fields.error(count, f"must be at most {MAX_EXPERTS}")
    if experts.per_token > experts.count:
        raise fields.error(fields.first_set(PER_TOKEN), f"must be at most {count} ({experts.count})")
    experts = replace(experts, count_field=count)
    if experts.groups == 1:
        return experts
    size, rest = divmod(experts.count, experts.groups)
    if rest or size < 2:  # a group's score is the sum of two
        raise fields.error("n_group", f"must divide {count} ({experts.count}) into groups of at least two")
    if experts.top_groups > experts.groups or experts.top_groups * size < experts.per_token:
        raise fields.error(
            "topk_group",
            f"must be at most n_group ({experts.groups}), and its groups of {size} experts must hold the "
            f"{experts.per_token} experts of a token",
        )
    return experts


def read_sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers of a Qwen model have experts.

    Every `decoder_sparse_step`-th layer has them, unless it is listed in `mlp_only_layers`.

    Raises:
        ConfigError: one of these fields is invalid.
    """
    step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", "must list layers without experts")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def read_amount(fields: Fields, name: str, default: int = 0) -> int:
    """Read an integer of 0 or more; a missing or null field has the default value.

    Raises:
        ConfigError: the field is anything else.
    """
    value = fields.values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise fields.error(name, "must be an integer of 0 or more")
    return value

# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of mixtures of experts from config.json. Importing this module imports no torch.

Only architectures of `MIXTURES` are counted, because config.json does not say where a model has experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.unsupported import find_experts_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Fields of config.json that give the sizes of a mixture's layers.

    A name is empty if the architecture has no such field.
    """

    width: str = "moe_intermediate_size"
    """Number of inner elements of an expert."""
    shared_experts: str = ""
    """Number of experts that every token runs through, each as wide as a routed one."""
    shared_width: str = ""
    """Number of inner elements of the only expert that every token runs through, which has a gate."""
    sparse_step: str = ""
    """Period of the layers with experts: layers step - 1, 2 * step - 1, … have them."""
    dense_layers: str = ""
    """Indices of layers without experts."""
    first_dense: str = ""
    """Number of layers without experts, at the beginning."""
    bias: str = ""
    """Whether queries, keys and values have biases."""
    biased_by_default: bool = False
    """Value of `bias` if it is absent."""
    biased_output: bool = False
    """Whether the output projection has a bias, too, if `bias` is true."""
    head_norms: bool = False
    """Whether queries and keys have norms with a weight for each element of a head."""
    head_norms_flag: str = ""
    """Whether they have such norms, if not all models of the architecture do."""
    full_norms: bool = False
    """Whether queries and keys have norms with a weight for each element of all heads."""


MIXTURES = {
    "Glm4MoeForCausalLM": Mixture(
        shared_experts="n_shared_experts",
        first_dense="first_k_dense_replace",
        bias="attention_bias",
        head_norms_flag="use_qk_norm",
    ),
    "MixtralForCausalLM": Mixture(width="intermediate_size"),
    "OlmoeForCausalLM": Mixture(
        width="intermediate_size", bias="attention_bias", biased_output=True, full_norms=True
    ),
    "Qwen2MoeForCausalLM": Mixture(
        shared_width="shared_expert_intermediate_size",
        sparse_step="decoder_sparse_step",
        dense_layers="mlp_only_layers",
        bias="qkv_bias",
        biased_by_default=True,
    ),
    "Qwen3MoeForCausalLM": Mixture(
        sparse_step="decoder_sparse_step",
        dense_layers="mlp_only_layers",
        bias="attention_bias",
        biased_output=True,
        head_norms=True,
    ),
}
"""Mixtures of experts by their architecture."""


def count_mixture(fields: Fields, config: ModelConfig) -> int:
    """Return the number of parameters of a mixture of experts, those of all experts included.

    The result is 0 if the architecture is unknown, or if a field of its sizes is absent or invalid.
    """
    mixture = MIXTURES.get(config.architecture)
    if mixture is None:
        return 0
    try:
        return _count(fields, config, mixture)
    except ConfigError:
        return 0


def _count(fields: Fields, config: ModelConfig, mixture: Mixture) -> int:
    hidden = config.hidden_size
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = hidden * 2 * (query + key_value) + 2 * hidden  # with both norms of the layer
    if fields.flag(mixture.bias, mixture.biased_by_default):
        attention += query + 2 * key_value + mixture.biased_output * hidden
    if mixture.full_norms:
        attention += query + key_value
    if mixture.head_norms or fields.flag(mixture.head_norms_flag):
        attention += 2 * config.head_dim
    experts, width = fields.integer(find_experts_field(fields)), fields.integer(mixture.width)
    sparse = hidden * experts + 3 * hidden * width * experts
    if mixture.shared_experts:
        shared = fields.integer(mixture.shared_experts)
        sparse += 3 * hidden * width * shared + experts  # the router of such a model has a bias
    if mixture.shared_width:
        sparse += 3 * hidden * fields.integer(mixture.shared_width) + hidden
    count = _count_sparse_layers(fields, config.layers, mixture)
    dense = 3 * hidden * config.intermediate_size
    tables = 1 if config.tie_embeddings else 2
    layers = config.layers * attention + count * sparse + (config.layers - count) * dense
    return layers + hidden + tables * hidden * config.vocab_size


def _count_sparse_layers(fields: Fields, layers: int, mixture: Mixture) -> int:
    step = fields.integer(mixture.sparse_step, 1)
    without = fields.values.get(mixture.dense_layers) or []
    if not isinstance(without, list):
        raise fields.error(mixture.dense_layers, "must be a list")
    first = fields.integer(mixture.first_dense) if mixture.first_dense else 0
    return sum((layer + 1) % step == 0 and layer not in without for layer in range(first, layers))

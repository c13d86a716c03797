# SPDX-License-Identifier: Apache-2.0
"""A decoder model's configuration, read from config.json into frozen dataclasses.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mizzen.common.model_task import ScoreActivation, Task
from mizzen.models.block import Activation, BlockConfig
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.experts_config import ExpertsConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.pooling.modules import DenseModule
from mizzen.models.rope_config import ORIGINAL, RopeConfig, read_rope, rope_fields
from mizzen.models.text_tensors import TextTensors
from mizzen.models.vision.config import VisionConfig
from mizzen.quantization.quantization import Quantization
from mizzen.quantization.reader import NO_QUANTIZATION, read_quantization

DTYPES = ("bfloat16", "float16", "float32")
MAX_LAYERS = 10_000
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "xielu": Activation.XIELU,
}
"""Activation functions by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder model, read from its config.json."""

    architecture: str
    implementation: str = "native"
    """Implementation that serves the model: "native" or "transformers"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    experts: ExpertsConfig | None = None
    """Mixtures of experts of a native implementation; None if all layers are dense."""
    expert_width: int = 0
    """Width of all experts together that one token runs through, in a model that runs through Transformers; 0
    without a mixture of experts."""
    transformers_parameters: int = 0
    """Number of parameters of a model that runs through Transformers; 0 if it is unknown. From config.json
    alone, it is known only for architectures that also have a native implementation."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    context_length: int
    """Maximum context length in tokens that the model supports."""
    ropes: tuple[RopeConfig, ...]
    """Rotary embeddings of the model; most models have one for all layers."""
    windows: tuple[int | None, ...]
    """Sliding window by layer: number of tokens that a token attends to, including itself; None for all."""
    tie_embeddings: bool
    rope_by_layer: tuple[int, ...] = ()
    """Index of each layer's rotary embedding in `ropes`; empty if all layers use the first."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """Structure of the decoder layers."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """Whether the output head has a bias of each token; a tied head has none."""
    embedding_multiplier: float = 1.0
    """Factor of the token embeddings (Gemma, Granite)."""
    rounds_embedding_multiplier: bool = False
    """Whether the factor is rounded to the model's dtype before the multiplication (Gemma)."""
    logits_multiplier: float = 1.0
    """Factor of the logits (Cohere, Granite)."""
    logits_softcap: float | None = None
    """Bound c of the logits, which become c * tanh(logit / c) (Gemma 2); None for none."""
    dtype: str = "bfloat16"
    """Data type in which the weights were saved."""
    quantization: Quantization = NO_QUANTIZATION
    """Schemes of quantized weights."""
    end_token_ids: tuple[int, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of names of checkpoint tensors that are not loaded, such as those of layers for
    multi-token prediction."""
    replicates_attention: bool = False
    """Whether every rank holds all heads, instead of a shard."""
    encoder: EncoderConfig | None = None
    """Structure of an encoder, whose prompts are computed whole and without KV; None for a decoder."""
    task: Task = Task.GENERATE
    """Task of the model. Checkpoints without an output head only embed or classify; the model of such a
    checkpoint is built with a tied head."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, by index; empty for other tasks."""
    score_activation: ScoreActivation = ScoreActivation.NONE
    """Default activation of a classifier's logits."""
    pooling: str = ""
    """Pooling of the model: that of its modules, or else the default of its architecture. Empty for the last
    token by default; may be the name of one that is not supported."""
    dense: tuple[DenseModule, ...] = ()
    """Dense modules that follow the pooling."""
    text_tensors: TextTensors | None = None
    """Tensors of the text part, if the checkpoint also holds other parts, such as a tower for images."""
    vision: VisionConfig | None = None
    """Vision encoder of a model for images; None if the model takes none, or its tower is not served."""

    @property
    def generates(self) -> bool:
        """Whether the model can generate text."""
        return self.task is Task.GENERATE

    @property
    def rope(self) -> RopeConfig:
        """The model's first rotary embedding."""
        return self.ropes[0]

    @property
    def active_width(self) -> int:
        """Inner elements of the feed-forward block that a token runs through, in the widest layers."""
        if self.experts is None:
            return max(self.intermediate_size, self.expert_width)
        dense = 0 if all(self.experts.layers) else self.intermediate_size
        return max(dense, self.experts.active_width)

    @property
    def layer_weights(self) -> int:
        """Approximate number of weights of a layer with which a token is multiplied."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden_size * self.active_width

    def rope_index(self, layer: int) -> int:
        """Return the index of a layer's rotary embedding in `ropes`."""
        return self.rope_by_layer[layer] if self.rope_by_layer else 0

    def with_context_length(self, length: int) -> ModelConfig:
        """Return the configuration for serving contexts of up to `length` tokens."""
        return replace(self, ropes=tuple(replace(rope, served_context=length) for rope in self.ropes))


def read_context_length(fields: Fields, rope: RopeConfig, default: int) -> int:
    """Return a model's maximum context length in tokens; yarn and dynamic extend config.json's value."""
    length = fields.integer("max_position_embeddings", default)
    if rope.kind == "dynamic":
        return max(length, int(rope.factor * length))
    if rope.kind != "yarn" or not any(ORIGINAL in holder.values for holder in (fields, rope_fields(fields))):
        return length
    return max(length, int(rope.factor * rope.original_context))


def read_windows(fields: Fields, layers: int, everywhere: int | None) -> tuple[int | None, ...]:
    """Read the sliding window of each layer in tokens; None for a layer with full attention.

    If config.json has `layer_types`, only its `sliding_attention` layers have a window; otherwise all layers
    have the window `everywhere`.

    Raises:
        ConfigError: `layer_types` or `sliding_window` is invalid.
    """
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return (everywhere,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must list {layers} layers")
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "may contain only full_attention and sliding_attention")
    window = fields.integer("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_layer_count(fields: Fields, name: str = "num_hidden_layers", default: int | None = None) -> int:
    """Read the number of layers from the field `name`; without a default the field is required.

    Raises:
        ConfigError: the field is not an integer from 1 to `MAX_LAYERS`, so that lists of layers stay small.
    """
    layers = fields.integer(name, default)
    if layers > MAX_LAYERS:
        raise fields.error(name, f"must be at most {MAX_LAYERS}")
    return layers


def set_layer_types(fields: Fields, period: int, *, last_is_full: bool = False) -> Fields:
    """Return the fields with `layer_types`, which is added if it is missing.

    Then every layer whose number, counted from 1, is a multiple of `period` has full attention, and with
    `last_is_full` the last layer has it as well. Other layers have a sliding window.
    """
    if fields.values.get("layer_types") is not None:
        return fields
    layers = read_layer_count(fields)
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    if last_is_full:
        kinds[-1] = "full_attention"
    return Fields({**fields.values, "layer_types": kinds}, fields.source)


def mark_layers(fields: Fields, kind: str) -> tuple[int, ...]:
    """Return 1 for each layer of a kind, such as "full_attention", and 0 for others; needs `layer_types`.

    Raises:
        ConfigError: `layer_types` is not a list.
    """
    kinds = fields.values["layer_types"]
    if not isinstance(kinds, list):
        raise fields.error("layer_types", "must list the kind of each layer")
    return tuple(int(layer_kind == kind) for layer_kind in kinds)


def read_heads(fields: Fields) -> tuple[int, int, int]:
    """Read the numbers of heads and KV heads, and the head dim.

    Raises:
        ConfigError: a field is missing or invalid, the number of KV heads does not divide the number of
            heads, or the head dim is not an even integer.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if fields.values.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "must be even, for rotary embedding")
    return heads, kv_heads, head_dim


def read_token_ids(fields: Fields, name: str = "eos_token_id") -> tuple[int, ...]:
    """Read a field that holds one token id, a list of ids, or null.

    Raises:
        ConfigError: the field holds anything else.
    """
    value = fields.values.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise fields.error(name, "must be a token id or a list of token ids")
    return tuple(ids)


def read_activation(fields: Fields, *names: str, default: str = "silu") -> Activation:
    """Read the activation function from the first of the fields `names` that is set.

    Raises:
        ConfigError: the function is not supported; the message lists the supported ones.
    """
    name = fields.first_set(names)
    value = fields.values.get(name) or default
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise fields.error(name, f"must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def check_causal(fields: Fields) -> None:
    """Check that config.json does not describe attention to later tokens.

    Raises:
        ConfigError: `is_causal` is false.
    """
    if not fields.flag("is_causal", True):
        raise fields.error("is_causal", "must be true: attention to later tokens is not supported")


def read_dtype(fields: Fields) -> str:
    """Read the data type in which the weights were saved; bfloat16 if config.json does not name it.

    Raises:
        ConfigError: the type is not one of `DTYPES`.
    """
    dtype = fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise fields.error("dtype" if "dtype" in fields.values else "torch_dtype", f"must be in {DTYPES}")
    return dtype


def read_decoder_config(
    fields: Fields,
    architecture: str,
    *,
    window: int | None = None,
    attention_bias: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    context_length: int = 2048,
    tie_embeddings: bool = False,
    norm_epsilon: float | None = None,
    activation: str = "silu",
    block: BlockConfig | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    rope_by_layer: tuple[int, ...] = (),
) -> ModelConfig:
    """Read the fields that all decoders share; the keyword arguments are specific to a family.

    `context_length`, `tie_embeddings` and `activation` are the family's defaults for values that config.json
    does not set. All layers have the sliding window `window`, unless config.json lists `layer_types`. Without
    `ropes`, all layers share the rotary embedding that config.json describes. `attention_bias` sets both
    `qkv_bias` and `output_bias`.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    heads, kv_heads, head_dim = read_heads(fields)
    check_causal(fields)
    block = block or BlockConfig()
    layers = read_layer_count(fields)
    ropes = ropes or (read_rope(fields, head_dim),)
    context = read_context_length(fields, ropes[0], context_length)
    dtype = read_dtype(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=fields.number("rms_norm_eps", 1e-6) if norm_epsilon is None else norm_epsilon,
        context_length=context,
        ropes=tuple(replace(rope, served_context=context) for rope in ropes),
        rope_by_layer=rope_by_layer,
        windows=read_windows(fields, layers, window),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_embeddings),
        block=replace(
            block, activation=read_activation(fields, "hidden_activation", "hidden_act", default=activation)
        ),
        qkv_bias=qkv_bias or attention_bias,
        output_bias=output_bias or attention_bias,
        mlp_bias=mlp_bias,
        dtype=dtype,
        quantization=read_quantization(fields),
        end_token_ids=read_token_ids(fields),
    )

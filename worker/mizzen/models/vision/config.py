# SPDX-License-Identifier: Apache-2.0
"""Description of a vision encoder by data: its tower, and the projectors that lead to the decoder.

A family's config reader fills in a `VisionConfig`, and `mizzen.models.vision.encoder` builds an encoder from
it. Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mizzen.models.block import Activation, NormKind

CHANNELS = 3
"""Colour channels of an image: red, green and blue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """Normalisation of 8-bit pixels: (pixel * rescale - mean) / std for each channel."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale: float = 1 / 255


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionNames:
    """Names of a tower's tensors in the engine, without the suffixes `.weight` and `.bias`.

    `TowerTensors` turns the names of a checkpoint into these names.
    """

    prefix: str = "visual."
    """Prefix of all names below."""
    patch_embedding: str = "patch_embed.proj"
    positions: str = "pos_embed"
    """Table of learned positions."""
    class_token: str = "embeddings.class_embedding"
    """Embedding of the class token; the name has no suffix in checkpoints."""
    first_norm: str = ""
    """Norm before the first layer; empty for none."""
    layer: str = "blocks"
    """Name of the list of layers."""
    attention_norm: str = "norm1"
    mlp_norm: str = "norm2"
    query_key_value: tuple[str, str, str] = ("attn.qkv", "attn.qkv", "attn.qkv")
    """Names of the query, key and value projections; equal names mean one tensor that holds all three."""
    output: str = "attn.proj"
    inner: tuple[str, ...] = ("mlp.fc1",)
    """Names of the gate and up projections; a block without a gate has a single name."""
    down: str = "mlp.fc2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """A projector: an MLP with one hidden layer that maps features of the tower to embeddings.

    Its input is the concatenation of hidden states of the tower. Blocks of `VisionConfig.merge` x
    `VisionConfig.merge` patches are concatenated to one input.
    """

    features: tuple[int, ...]
    """Hidden states that are the input: 0 for the input of the tower's first layer, i for the output of its
    layer i - 1."""
    first: str
    """Full name of the first linear layer."""
    second: str
    inner_size: int
    """Number of elements between the two linear layers."""
    bias: bool = True
    activation: Activation = Activation.GELU
    norm: str = ""
    """Full name of the norm of the features; empty for none."""
    norm_kind: NormKind = NormKind.LAYER
    norm_epsilon: float = 1e-6
    norm_after_merge: bool = False
    """Whether the norm is over the features of a whole block of patches, instead of those of a patch."""
    merging: str = ""
    """Full name of a linear layer without bias that maps the features of a block to those of a patch
    (Mistral 3); empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerTensors:
    """Tensors of the tower and its projectors in a checkpoint."""

    prefixes: tuple[tuple[str, str], ...]
    """Pairs of a prefix of names in checkpoints and the prefix that replaces it; the first match counts."""

    def find_own_name(self, name: str) -> str | None:
        """Return the engine's name of a tensor; None if the tensor belongs to another part."""
        for stored, own in self.prefixes:
            if name.startswith(stored):
                return own + name.removeprefix(stored)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Architecture of a vision encoder: a vision transformer (arXiv 2010.11929) and its projectors."""

    model_type: str
    """Type of the tower, as config.json names it."""
    tensors: TowerTensors
    names: VisionNames = field(default_factory=VisionNames)
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of names, as the engine has them, of tensors that are not loaded."""
    normalisation: Normalisation = field(default_factory=Normalisation)

    layers: int
    """Number of layers that are computed: those up to the last one whose output is used."""
    hidden_size: int
    intermediate_size: int
    heads: int
    norm: NormKind = NormKind.LAYER
    norm_epsilon: float = 1e-6
    activation: Activation = Activation.GELU
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True

    patch_size: int
    """Height and width of a patch in pixels."""
    frames: int = 1
    """Number of video frames in a patch; an image is repeated."""
    patch_bias: bool = False
    image_size: int = 0
    """Height and width of each tile in pixels; 0 if images may have any size."""
    positions: int = 0
    """Number of learned positions of patches, a square; 0 for none. They are interpolated unless `image_size`
    is set."""
    class_token: bool = False
    """Whether a class token precedes the patches of each tile."""
    drops_first: bool = False
    """Whether the projectors leave out the first token of each tile."""
    rope_theta: float | None = None
    """Base of the rotary embedding of rows and columns; None for none."""
    rope_alternates: bool = False
    """Whether rows and columns take turns in the frequencies of a whole head (Pixtral), instead of each
    having those of half a head."""
    window: int = 0
    """Height and width in merged patches of the windows of attention; 0 if all layers see the whole tile."""
    full_layers: tuple[int, ...] = ()
    """Layers with full attention, if the others have windows."""

    merge: int = 1
    """Height and width in patches of the blocks that become one embedding."""
    projectors: tuple[ProjectorConfig, ...]
    """Projector of the embeddings, and then projectors of features that are added to the outputs of the
    decoder's first layers (DeepStack, arXiv 2406.04334)."""
    output_size: int
    """Number of elements of an embedding: the decoder's hidden size."""
    newline: str = ""
    """Name of the embedding that ends each row of a picture of several tiles (LLaVA-NeXT); empty if tiles are
    independent of each other."""

    @property
    def head_dim(self) -> int:
        """Number of elements of a head."""
        return self.hidden_size // self.heads

    @property
    def side(self) -> int:
        """Number of patches in a row or column of a tile of fixed size."""
        return self.image_size // self.patch_size

    @property
    def unit(self) -> int:
        """Number of pixels that must divide the height and width of an image."""
        return self.patch_size * self.merge

    @property
    def deepstack_layers(self) -> int:
        """Number of the decoder's first layers to whose outputs features of the image are added."""
        return len(self.projectors) - 1

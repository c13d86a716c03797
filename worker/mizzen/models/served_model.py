# SPDX-License-Identifier: Apache-2.0
"""`ServedModel`: the interface by which the engine uses native models and those of Transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.image_rows import BatchImages
from mizzen.models.pooling.output import PooledOutput
from mizzen.parallel.collectives import Collectives

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class ServedModel(Protocol):
    """A model, or the shard of one rank, that maps token ids to logits.

    `mizzen.models.base.DecoderModel` documents the methods.
    """

    config: ModelConfig
    collectives: Collectives
    embedding: Any
    """Token embedding; its `weight` has the dtype and the device of the model."""
    ignored: Sequence[re.Pattern[str]]
    """Patterns of the names of checkpoint tensors that the model does not need."""
    pooled: PooledOutput
    """Layers that follow the pooled hidden state: a classification head, or those of an embedding model."""
    norm: Any
    """Function that normalises the result of `hidden`."""

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
        ...

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        ...

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
        *,
        rotary: torch.Tensor | None = None,
        images: BatchImages | None = None,
    ) -> torch.Tensor:
        """Run the layers over a batch of tokens; return hidden states [tokens or rows, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for hidden states [rows, hidden], in `out` if given."""
        ...

    def attention_sinks(self) -> torch.Tensor | None:
        """Return the attention sinks of this rank [layers, heads]; None for a model without."""
        ...

    def without_fused_swiglu(self) -> AbstractContextManager[None]:
        """Disable a kernel that saves memory, in a `with` block that profiles peak memory."""
        ...

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of the GEMM kernels for these batch sizes."""
        ...

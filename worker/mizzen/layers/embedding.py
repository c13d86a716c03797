"""Token embedding and the output head, which may share their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.build import Build, RowPart, Target
from mizzen.layers.linear import few_rows, widest_product


class Embedding:
    """Rows of a table [vocab, hidden] by token id."""

    def __init__(self, build: Build, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.weight = build.empty(vocab, hidden)

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield where the checkpoint's tensor goes."""
        vocab, hidden = self.weight.shape
        yield Target(
            name=f"{prefix}{self.name}.weight",
            shape=(vocab, hidden),
            part=(slice(0, vocab), slice(0, hidden)),
            into=self.weight,
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ids [tokens] to [tokens, hidden], freshly allocated."""
        return F.embedding(tokens, self.weight)


class TiedHead:
    """Logits from the embedding's own table."""

    def __init__(self, build: Build, embedding: Embedding) -> None:
        self.embedding = embedding
        self.widest = widest_product(embedding.weight) if build.fused else 0

    def targets(self) -> Iterator[Target]:
        """Yield nothing: the table is loaded as the embedding."""
        return iter(())

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        if len(x) <= self.widest:
            return few_rows(self.embedding.weight, x, out)
        if out is None:
            return F.linear(x, self.embedding.weight)
        return torch.mm(x, self.embedding.weight.t(), out=out)


class Head:
    """Logits from a table of their own."""

    def __init__(self, build: Build, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.part = RowPart(start=0, rows=slice(0, vocab), columns=slice(0, hidden), shape=(vocab, hidden))
        self.method = build.linear(vocab, hidden, False, build.dtype, build.device)

    def targets(self) -> Iterator[Target]:
        """Yield where the checkpoint's tensor goes."""
        yield from self.method.targets(self.name, self.part)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        return self.method.apply(x, out)

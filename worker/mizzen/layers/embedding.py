"""Token embedding and the output head, which may share their weights; both are split by the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mizzen.layers.build import Build, RowPart, Target
from mizzen.layers.linear import few_rows, widest_product

ROW_MULTIPLE = 8
"""Ranks have room for a multiple of so many tokens each, as kernels want it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which tokens a rank has rows for."""

    total: int
    room: int
    """Rows of each rank's table."""
    held: slice
    """Tokens of this rank; rows behind theirs are padding."""

    @classmethod
    def of(cls, build: Build, total: int) -> Vocabulary:
        """Split a vocabulary over the ranks."""
        return cls(total, *build.mesh.tensor.padded_part(total, ROW_MULTIPLE))

    @property
    def count(self) -> int:
        """Tokens of this rank."""
        return self.held.stop - self.held.start


class Embedding:
    """Rows of a table [vocab, hidden] by token id."""

    def __init__(self, build: Build, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.hidden = hidden
        self.vocabulary = Vocabulary.of(build, vocab)
        self.ranks = build.ranks
        self.weight = build.empty(self.vocabulary.room, hidden)
        self.weight[self.vocabulary.count :].zero_()

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield where the checkpoint's tensor goes."""
        vocabulary = self.vocabulary
        yield Target(
            name=f"{prefix}{self.name}.weight",
            shape=(vocabulary.total, self.hidden),
            part=(vocabulary.held, slice(0, self.hidden)),
            into=self.weight[: vocabulary.count],
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ids [tokens] to [tokens, hidden], freshly allocated."""
        if self.ranks.size == 1:
            return F.embedding(tokens, self.weight)
        vocabulary = self.vocabulary
        rows = self.ranks.lookup(tokens, self.weight, vocabulary.held, vocabulary.total)
        if rows is not None:
            return rows
        rows = tokens - self.vocabulary.held.start
        elsewhere = (rows < 0) | (rows >= self.vocabulary.count)
        found = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self.ranks.all_reduce(found.masked_fill_(elsewhere[:, None], 0))


class TiedHead:
    """Logits from the embedding's own table."""

    def __init__(self, build: Build, embedding: Embedding) -> None:
        self.embedding = embedding
        self.ranks = build.ranks
        self.widest = widest_product(embedding.weight) if build.fused else 0

    def targets(self) -> Iterator[Target]:
        """Yield nothing: the table is loaded as the embedding."""
        return iter(())

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        if self.ranks.size == 1:
            return self.part(x, out)
        return self.ranks.gather_columns(self.part(x), self.embedding.vocabulary.total, out)

    def part(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of this rank's tokens."""
        if len(x) <= self.widest:
            return few_rows(self.embedding.weight, x, out)
        if out is None:
            return F.linear(x, self.embedding.weight)
        return torch.mm(x, self.embedding.weight.t(), out=out)


class Head:
    """Logits from a table of their own."""

    def __init__(self, build: Build, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.ranks = build.ranks
        self.vocabulary = Vocabulary.of(build, vocab)
        self.part = RowPart(
            start=0, rows=self.vocabulary.held, columns=slice(0, hidden), shape=(vocab, hidden)
        )
        self.method = build.linear(self.vocabulary.room, hidden, False, build.dtype, build.device)

    def targets(self) -> Iterator[Target]:
        """Yield where the checkpoint's tensor goes."""
        yield from self.method.targets(self.name, self.part)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        if self.ranks.size == 1:
            return self.method.apply(x, out)
        return self.ranks.gather_columns(self.method.apply(x), self.vocabulary.total, out)

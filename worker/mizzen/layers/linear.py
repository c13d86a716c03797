"""Linear layers, merged from several of the checkpoint's and split over the tensor axis."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.build import Build, RowPart, Target


class Dense:
    """Plain weights: `weight` [rows, columns] and an optional `bias` [rows], in the model's dtype."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def targets(self, name: str, part: RowPart) -> Iterator[Target]:
        """Yield where the tensors of the checkpoint's layer `name` go."""
        here = slice(part.start, part.start + part.rows.stop - part.rows.start)
        yield Target(
            name=f"{name}.weight",
            shape=part.shape,
            part=(part.rows, part.columns),
            into=self.weight[here],
        )
        if self.bias is not None:
            yield Target(name=f"{name}.bias", shape=part.shape[:1], part=(part.rows,), into=self.bias[here])

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` where it is given."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class SkinnyDense(Dense):
    """Plain weights, with a kernel of our own for the product of a single row."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, columns, bias, dtype, device)
        self.skinny = not bias and serves_rows(self.weight)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` where it is given."""
        if self.skinny and len(x) == 1:
            return row_product(self.weight, x, out)
        return super().apply(x, out)


def serves_rows(weight: torch.Tensor) -> bool:
    """Tell whether `row_product` can run with a weight [rows, columns]."""
    if weight.device.type != "cuda":
        return False
    from mizzen.kernels.gemv import serves

    return serves(weight)


def row_product(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Map a single row [1, columns] to [1, rows]."""
    from mizzen.kernels.gemv import gemv

    return gemv(weight, x, out)


class MergedLinear:
    """Several linear layers of one input as one product; each is split by output rows over the ranks.

    `parts` maps names in the checkpoint to output rows; the output is their outputs side by side.
    """

    def __init__(self, build: Build, parts: dict[str, int], columns: int, bias: bool) -> None:
        self.parts: dict[str, RowPart] = {}
        start = 0
        for name, rows in parts.items():
            held = build.mesh.tensor.part(rows, f"output rows of {name}")
            self.parts[name] = RowPart(
                start=start, rows=held, columns=slice(0, columns), shape=(rows, columns)
            )
            start += held.stop - held.start
        self.method = build.linear(start, columns, bias, build.dtype, build.device)

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        for name, part in self.parts.items():
            yield from self.method.targets(prefix + name, part)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows held]."""
        return self.method.apply(x)


class InputSplitLinear:
    """A linear layer split by input columns, behind layers that are split by output rows."""

    def __init__(self, build: Build, name: str, rows: int, columns: int, bias: bool) -> None:
        held = build.mesh.tensor.part(columns, f"input columns of {name}")
        self.name = name
        self.part = RowPart(start=0, rows=slice(0, rows), columns=held, shape=(rows, columns))
        self.method = build.linear(rows, held.stop - held.start, bias, build.dtype, build.device)

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.method.targets(prefix + self.name, self.part)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, columns held] to [tokens, rows]: this rank's term of the sum over ranks."""
        return self.method.apply(x)

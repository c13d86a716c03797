"""Linear layers, merged from several of the checkpoint's and split over the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext, LinearMethod, CheckpointShard, WeightTarget
from mizzen.layers.norm import RMSNorm

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec

MAX_BATCH_BEFORE_ATTENTION = ((8 << 20, 64), (256 << 20, 48))
"""(weights at most, rows): up to how many a product of our own pays ahead of attention, measured in steps."""
MIN_FUSED_ADD_ROWS = 1024
"""Rows from which a library's product is added to the residual stream at once, measured on an H200."""
MAX_NORM_COLUMNS = 2048
"""Up to so many columns it pays that every block of a single row's product normalises it for itself."""


class UnquantizedLinear:
    """Plain weights: `weight` [rows, columns] and an optional `bias` [rows], in the model's dtype."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def targets(self, name: str, part: CheckpointShard) -> Iterator[WeightTarget]:
        """Yield where the tensors of the checkpoint's layer `name` go."""
        here = slice(part.start, part.start + part.rows.stop - part.rows.start)
        yield WeightTarget(
            name=f"{name}.weight",
            shape=part.shape,
            part=(part.rows, part.columns),
            into=self.weight[here],
        )
        if self.bias is not None:
            yield WeightTarget(name=f"{name}.bias", shape=part.shape[:1], part=(part.rows,), into=self.bias[here])

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` where it is given."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class SmallBatchLinear(UnquantizedLinear):
    """Plain weights, with kernels of our own for the products of few rows, and for what surrounds them."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, columns, bias, dtype, device)
        self.widest = 0 if bias else max_small_batch(self.weight)
        """Most rows that the kernels serve; 0 when none."""
        self.max_swiglu_batch = 0 if bias else max_small_batch(self.weight, gate=True)
        """The same where the outputs are gates and what they multiply."""
        self.gates_prompts = not bias and gates_prompts(self.weight)
        """There is a kernel that makes these in one go of many rows."""
        self.defer_pdl = False
        """Let the kernel behind the product not begin early, see `mizzen.kernels.gemm.swap_ab`."""

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows], into `out` where it is given."""
        if len(x) <= self.widest and (out is None or out.is_contiguous()):
            return small_batch_gemm(self.weight, x, out, late=self.defer_pdl)
        return super().apply(x, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, columns] to silu(gates) * others [tokens, rows / 2]; `gates` are the upper rows."""
        if len(x) <= self.max_swiglu_batch:
            return small_batch_gemm(self.weight, x, None, gate=True)
        if self.gates_prompts and (done := prefill_swiglu(self.weight, x)) is not None:
            return done
        from mizzen.kernels.swiglu import silu_mul

        return silu_mul(super().apply(x))

    def kernel_specs(self, counts: Iterable[int], *, gate: bool) -> set[KernelSpec]:
        """Return `gemm_kernel_specs` of these weights, and what products of prompts are compiled from."""
        most = self.max_swiglu_batch if gate else self.widest
        late = self.defer_pdl and not gate
        found = gemm_kernel_specs(self.weight, counts, most, gate=gate, late=late)
        if not gate or not self.gates_prompts:
            return found
        from mizzen.kernels.gemm.gate_up_swiglu import kernel

        return found | {kernel()}

    def after(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor, gate: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Do what `MergedColumnParallelLinear.after` does in one kernel; None where there is none that pays."""
        if len(residual) != 1 or not self.widest or self.weight.shape[1] > MAX_NORM_COLUMNS:
            return None
        from mizzen.kernels.gemm.gemv import Norm, gemv

        if x is None:
            scaling = Norm(scale=norm.weight, epsilon=norm.epsilon)
            return gemv(self.weight, residual, gate=gate, norm=scaling), residual
        total = torch.empty_like(residual)
        scaling = Norm(scale=norm.weight, epsilon=norm.epsilon, residual=residual)
        return gemv(self.weight, x, gate=gate, norm=scaling, after=total), total


def method_kernel_specs(method: LinearMethod, counts: Iterable[int], *, gate: bool = False) -> set[KernelSpec]:
    """Return `SmallBatchLinear.kernels` of weights that are such, else nothing."""
    return method.kernels(counts, gate=gate) if isinstance(method, SmallBatchLinear) else set()


def gemm_kernel_specs(
    weight: torch.Tensor, counts: Iterable[int], most: int, *, gate: bool = False, late: bool = False
) -> set[KernelSpec]:
    """Return what `small_batch_gemm` of these counts, up to `most`, is compiled from, where that takes long."""
    from mizzen.kernels.gemm import small_m, swap_ab

    (rows, columns), least = weight.shape, small_m.widest(weight)
    few = (count for count in counts if least < count <= most)
    return swap_ab.kernels(rows, columns, few, gate=gate, late=late)


def max_small_batch(weight: torch.Tensor, *, gate: bool = False) -> int:
    """Return for how many rows `small_batch_gemm` is faster than cuBLAS with a weight [rows, columns]; 0 is none."""
    if weight.device.type != "cuda":
        return 0
    from mizzen.kernels.gemm import gemv, small_m, swap_ab
    from mizzen.kernels.launch import has_wgmma

    if not gemv.serves(weight, gate=gate):
        return 0
    most = swap_ab.widest(weight, gate=gate) if has_wgmma(weight.device) else 0
    return max(small_m.widest(weight), most)


def gates_prompts(weight: torch.Tensor) -> bool:
    """Tell whether `prefill_swiglu` can be asked with a weight."""
    if weight.device.type != "cuda":
        return False
    from mizzen.kernels.gemm import gate_up_swiglu, gemv
    from mizzen.kernels.launch import has_wgmma

    return gemv.serves(weight, gate=True) and has_wgmma(weight.device) and gate_up_swiglu.serves(weight)


def prefill_swiglu(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Map rows [tokens, columns] to silu(gates) * others [tokens, rows / 2] by one kernel, where it pays."""
    from mizzen.kernels.gemm import gate_up_swiglu

    if not gate_up_swiglu.pays(len(weight), len(x), gate_up_swiglu.clusters(x.device)):
        return None
    return gate_up_swiglu.gated(weight, x)


def small_batch_gemm(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None,
    *,
    gate: bool = False,
    late: bool = False,
) -> torch.Tensor:
    """Map few rows [tokens, columns] to [tokens, rows], or to silu(gates) * others [tokens, rows / 2].

    All are contiguous. `late` is that of `mizzen.kernels.gemm.swap_ab`; kernels of fewer rows let the next begin.
    """
    from mizzen.kernels.gemm import gemv, small_m, swap_ab

    if len(x) == 1:
        return gemv.gemv(weight, x, out, gate=gate)
    if len(x) <= small_m.widest(weight):
        return small_m.skinny(weight, x, out, gate=gate)
    return swap_ab.wide(weight, x, out, gate=gate, late=late)


@dataclass(frozen=True, slots=True)
class Rows:
    """Output rows of a linear layer: how many it has, and which of them this rank holds."""

    total: int
    held: slice

    @classmethod
    def of(cls, units: int, size: int, held: slice) -> Rows:
        """Return the rows of `units` (heads) of `size` rows each, of which this rank holds `held`."""
        return cls(units * size, slice(held.start * size, held.stop * size))


class MergedColumnParallelLinear:
    """Several linear layers of one input as one product; each is split by output rows over the ranks.

    `parts` maps names in the checkpoint to output rows; the output is their outputs side by side.
    """

    def __init__(self, build: BuildContext, parts: dict[str, Rows], columns: int, bias: bool) -> None:
        self.parts: dict[str, CheckpointShard] = {}
        self.collectives = build.collectives
        start = 0
        for name, rows in parts.items():
            held, shape = rows.held, (rows.total, columns)
            self.parts[name] = CheckpointShard(start=start, rows=held, columns=slice(0, columns), shape=shape)
            start += held.stop - held.start
        self.method = build.make_linear(start, columns, bias, build.dtype, build.device)
        if isinstance(self.method, SmallBatchLinear):
            size = start * columns
            most = next((rows for weights, rows in MAX_BATCH_BEFORE_ATTENTION if size <= weights), 0)
            self.method.widest = min(self.method.widest, most)
            self.method.defer_pdl = True

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        for name, part in self.parts.items():
            yield from self.method.targets(prefix + name, part)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, columns] to [tokens, rows held]."""
        return self.method.apply(x)

    def after(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor, *, gate: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, normalise, multiply.

        Args:
            norm: What lies between the residual stream and this layer.
            x: The term of the stream [tokens, columns] that `residual` lacks, of this rank's: the stream gets
                its sum over ranks. None when it lacks none.
            residual: The stream [tokens, columns]; may be updated in place.
            gate: The outputs are gates and then what they multiply; return silu(gates) * others.

        Returns:
            The outputs, and the stream with `x`.
        """
        method = self.method
        if x is not None and self.collectives.size > 1:
            inputs = self.collectives.all_reduce_add_norm(x, residual, norm.weight, norm.epsilon)
            if inputs is not None:
                return self.apply(inputs, gate), residual
            x = self.collectives.all_reduce(x)
        if isinstance(method, SmallBatchLinear) and (done := method.after(norm, x, residual, gate)) is not None:
            return done
        inputs = norm(residual) if x is None else norm.add(x, residual)
        return self.apply(inputs, gate), residual

    def apply(self, inputs: torch.Tensor, gate: bool) -> torch.Tensor:
        """Multiply; with `gate`, return silu(gates) * others."""
        method = self.method
        if not gate:
            return method.apply(inputs)
        if isinstance(method, SmallBatchLinear):
            return method.gated(inputs)
        gates, others = method.apply(inputs).chunk(2, dim=-1)
        return F.silu(gates).mul_(others)


class RowParallelLinear:
    """A linear layer split by input columns, behind layers that are split by output rows."""

    def __init__(self, build: BuildContext, name: str, rows: int, columns: int, bias: bool) -> None:
        held = build.mesh.tensor.shard(columns, f"input columns of {name}")
        self.name = name
        self.part = CheckpointShard(start=0, rows=slice(0, rows), columns=held, shape=(rows, columns))
        # The sum over ranks gets the bias once, from the first.
        adds = bias and build.collectives.rank == 0
        self.elsewhere = bias and not adds
        self.method = build.make_linear(rows, held.stop - held.start, adds, build.dtype, build.device)
        self.nothing = build.allocate(0)
        method, alone = self.method, build.fused and build.collectives.size == 1 and not bias
        # Exactly these kinds: what derives from them may be more than its weights.
        self.fused_add_method = method if alone and type(method) in (UnquantizedLinear, SmallBatchLinear) else None
        """Whose products of many rows are added to the residual stream as they end; None where none is."""

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.method.targets(prefix + self.name, self.part)
        if self.elsewhere:
            rows = self.part.shape[0]
            yield WeightTarget(
                name=f"{prefix}{self.name}.bias", shape=(rows,), part=(slice(0, 0),), into=self.nothing
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, columns held] to [tokens, rows]: this rank's term of the sum over ranks."""
        return self.method.apply(x)

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Map x [tokens, columns held] to this rank's term of the residual stream [tokens, rows].

        Of many rows it is added to `residual` in place, by the product itself, and None is returned.
        """
        if self.fused_add_method is None or len(x) < MIN_FUSED_ADD_ROWS:
            return self.method.apply(x)
        torch.addmm(residual, x, self.fused_add_method.weight.t(), out=residual)
        return None

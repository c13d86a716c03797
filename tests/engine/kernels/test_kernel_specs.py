# SPDX-License-Identifier: Apache-2.0
"""Start-up compiles exactly the kernels that layers, attention and captured graphs load later."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import warmup
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.linear_methods.base import LinearKind, LinearPart, LinearSpec
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear
from mizzen.layers.linear_methods.w8a8 import Operands, W8A8Linear
from mizzen.models.block import Activation
from mizzen.quantization.schemes import Activations, ActivationScales, Fp8Layout, Fp8Weights, ScaleShape

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from mizzen.kernels.attention import flash_decode_mma
from mizzen.kernels.attention.flash_decode_triton import (
    DecodeTiling,
    LayerKV,
    QKVPrep,
    SplitWorkspace,
)
from mizzen.kernels.gemm import gate_up_swiglu, hopper, small_m, swap_ab, w8a8_swap_ab
from mizzen.kernels.quantization.inputs import InputFormat

Specs = set[tuple[Any, ...]]


@pytest.fixture
def loaded_specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    """Record the specs of the GEMM kernels that are loaded; nothing is compiled or launched."""
    specs: Specs = set()
    for module in (swap_ab, gate_up_swiglu):
        monkeypatch.setattr(module, "load_kernel", lambda *kernel: specs.add(kernel[:-1]))
        monkeypatch.setattr(module, "launch", lambda *launch, **options: None)
    for module in (swap_ab, gate_up_swiglu, hopper):
        monkeypatch.setattr(module, "make_tensor_map", lambda *dims: None)
    monkeypatch.setattr(gate_up_swiglu, "concurrent_clusters", lambda device: 66)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    return specs


@pytest.mark.parametrize(("swiglu", "bias"), [(False, False), (False, True), (True, False)])
def test_linear_layers_load_exactly_the_kernels_compiled_at_start_up(
    swiglu: bool, bias: bool, loaded_specs: Specs
) -> None:
    rows = 24576 if swiglu else 6144
    spec = LinearSpec(
        parts=(),
        rows=rows,
        columns=4096,
        bias=bias,
        kind=LinearKind.COLUMN,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
    )
    method = SmallBatchLinear(spec)
    silu = ActivationFunction(BuildContext(device=spec.device, dtype=spec.dtype, fused=True), Activation.SILU)
    method.max_batch, method.max_swiglu_batch, method.defer_pdl = 48, 256, True
    method.fuses_prefill_swiglu = True
    batch_sizes = (1, 2, 4, *range(8, 513, 8), 1024)
    max_batch = 256 if swiglu else 48
    for size in batch_sizes:
        if small_m.max_batch(method.weight) < size <= max_batch or (swiglu and size == 1024):
            x = torch.empty(size, 4096, dtype=torch.bfloat16, device="meta")
            method.apply_glu(x, silu) if swiglu else method.apply(x)
    assert len(loaded_specs) == (17 if swiglu else 3)
    assert {dict(spec[-1]).get("BIAS", 0) for spec in loaded_specs} == {int(bias)}
    assert loaded_specs == method.kernel_specs(batch_sizes, activation=silu if swiglu else None)


@pytest.mark.parametrize("swiglu", [False, True])
def test_eager_steps_of_w8a8_layers_load_no_kernel_that_was_not_compiled(
    swiglu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of scales end the kernel with SwiGLU at 96 rows, and the one without it at 128.

    The kernel without SwiGLU lets attention of up to 8 rows start early.
    """
    specs: Specs = set()
    monkeypatch.setattr(w8a8_swap_ab, "load_kernel", lambda *kernel: specs.add(kernel[:-1]))
    monkeypatch.setattr(w8a8_swap_ab, "launch", lambda *launch, **options: None)
    for name in ("make_tensor_map", "make_weight_map"):
        monkeypatch.setattr(w8a8_swap_ab, name, lambda *dims, **options: None)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    device, rows, columns = torch.device("meta"), 24576, 4096
    part = LinearPart(
        name="layer", first_row=0, rows=slice(0, rows), columns=slice(0, columns), shape=(rows, columns)
    )
    spec = LinearSpec(
        parts=(part,),
        rows=rows,
        columns=columns,
        bias=False,
        kind=LinearKind.COLUMN,
        swiglu=swiglu,
        dtype=torch.bfloat16,
        device=device,
    )
    activations = Activations(scales=ActivationScales.TOKEN_GROUP, group_size=128)
    scheme = Fp8Weights(
        scale_shape=ScaleShape.BLOCK,
        block=(128, 128),
        activations=activations,
        layout=Fp8Layout.HUGGING_FACE,
    )
    method = W8A8Linear(spec, scheme)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(rows // 128, columns // 128, device=device)
    method.operands = Operands(
        weight=w8a8_swap_ab.W8A8Weight(values=codes, scales=scales, row_step=128),
        inputs=InputFormat(dtype=codes.dtype, grouped=True),
        library_bias=None,
        uses_library=True,
    )
    silu = ActivationFunction(BuildContext(device=device, dtype=spec.dtype), Activation.SILU)
    for count in range(1, 129):
        values = torch.empty(count, columns, dtype=codes.dtype, device=device)
        inputs = w8a8_swap_ab.QuantizedInputs(
            values=values, scales=torch.empty(columns // 128, -(-count // 4) * 4, device=device)
        )
        if swiglu:
            method._multiply_glu(method.operands, inputs, silu)
        else:
            method._multiply(method.operands, inputs)
    assert len(specs) == 9
    assert specs == method.kernel_specs((1, 2, 4, 8), activation=silu if swiglu else None)
    for defines in (dict(spec[-1]) for spec in specs):
        assert defines["DEFER_PDL"] == (defines["BATCH"] > (96 if swiglu else 8))


@pytest.mark.parametrize("tied", [False, True])
def test_heads_of_small_vocabularies_load_exactly_the_kernels_compiled_at_start_up(
    tied: bool, loaded_specs: Specs
) -> None:
    build = BuildContext(device=torch.device("meta"), dtype=torch.bfloat16, make_linear=SmallBatchLinear)
    embedding = TokenEmbedding(build, "table", 32768, 4096)
    head: TiedHead | Head = TiedHead(build, embedding) if tied else Head(build, "head", 32768, 4096)
    (head if isinstance(head, TiedHead) else cast(SmallBatchLinear, head.method)).max_batch = 192
    for size in range(8, 193, 8):
        head(torch.empty(size, 4096, dtype=torch.bfloat16, device="meta"))
    assert len(loaded_specs) == 12
    assert loaded_specs == head.kernel_specs((1, 2, 4, *range(8, 257, 8)))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_attention_loads_exactly_the_kernels_compiled_at_start_up(
    stored: torch.dtype, norm: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: Specs = set()
    monkeypatch.setattr(flash_decode_mma, "load_kernel", lambda *kernel: specs.add(kernel[:-1]))
    monkeypatch.setattr(flash_decode_mma, "launch", lambda *launch, **options: None)
    kv_heads, group, head_dim, page = 8, 4, 128, 16
    dummy = torch.empty(1, dtype=torch.int32, device="meta")
    keys = torch.empty(page, kv_heads, head_dim, dtype=stored, device="meta")
    cache = LayerKV(
        keys=keys,
        values=keys,
        slots=dummy,
        lengths=dummy,
        table=dummy[None],
        page_size=page,
        sinks=dummy if sinks else None,
    )
    workspace = SplitWorkspace(sums=dummy, stats=dummy, counters=dummy)
    norms = (dummy, dummy) if norm else None
    qkv_prep = QKVPrep(norms=norms, epsilon=1e-6, cos=dummy, sin=dummy, slot_mapping=dummy)
    blocks_per_sm = flash_decode_mma.BLOCKS_PER_SM[head_dim, stored]
    windows = (None, 1000, 128)
    for rows in range(1, 300):
        splits, warps = flash_decode_mma.select_splits(rows * kv_heads, 132, blocks_per_sm)
        tiling = DecodeTiling(splits=splits, block=16, warps=warps, stages=0)
        q = torch.empty(rows, kv_heads * group, head_dim, device="meta")
        for window, prep, items in product(windows, (qkv_prep, None), (None, dummy)):
            flash_decode_mma.attend(q, prep, cache, q, window, tiling, workspace, items)
    assert specs == flash_decode_mma.kernel_specs(keys, group, page, windows, norm=norm, sinks=sinks)
    assert len(specs) == 24


def test_gemm_kernels_of_graphs_are_compiled_before_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[set[int] | str] = []
    decode = SimpleNamespace(sizes=[1, 8, 32])
    prefill = SimpleNamespace(sizes=[16, 64, 384], max_sequences=48)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(warmup, "make_decode_graphs", lambda options, step: decode)
    monkeypatch.setattr(warmup, "make_prefill_graphs", lambda options, step: prefill)
    monkeypatch.setattr(warmup, "compile_kernels", lambda step, counts, *args: events.append(counts))
    monkeypatch.setattr(warmup, "CudaRunner", lambda *args: events.append("captured"))
    options = EngineOptions(model="model", device="cuda")
    step = cast(StepExecutor, SimpleNamespace(model=None, images=None))
    warmup.make_runner(options, step, torch.device("cuda"), None, lambda done, total: None)
    assert events == [{1, 8, 32, 16, 64, 384, 48}, "captured"]

# SPDX-License-Identifier: Apache-2.0
"""Special values and variants of the tensors of quantized layers are read exactly, or refused by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from quantized_layer_kit import Change, restore, write_layers
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from integer_formats import Gptq
from mizzen.layers.embedding import Head
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.linear_methods.base import LinearKind, LinearPart
from mizzen.layers.quantized.canonical import Codes
from mizzen.layers.quantized.stored_layer import IGNORED
from mizzen.quantization.schemes import ActivationScales
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.load import fill_dummy, load_checkpoint
from quantized_formats import FORMATS, FP8

if TYPE_CHECKING:
    from mizzen.layers.linear_methods.dequantized import DequantizedLinear

SHAPES = {"gate": (256, 128), "up": (128, 128)}


def edit(name: str, function: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    """Return a change of one tensor; a result of None removes it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if (changed := function(tensors.pop(name))) is not None:
            tensors[name] = changed.contiguous()

    return change


def set_element(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sets one element of a tensor; one of 8 bits by its code."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        elements = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        elements.view(-1)[index] = value
        return tensor

    return function


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_rows_with_dead_scales_stay_exact(scale: float, tmp_path: Path) -> None:
    change = edit("up.weight_scale", set_element(3, scale))
    files = write_layers(tmp_path, FORMATS["ct-fp8-channel-f32"], SHAPES, change=change)
    restored, expected = files.load_rows().weight.dequantize(), torch.cat(list(files.weights.values()))
    assert restored[259].abs().max() <= 448 * scale and (scale == 0 or restored[259].any())
    expected[259] = restored[259]
    assert torch.equal(restored, expected)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [name for name in FP8 if name != "modelopt-fp8-blocks"])
def test_nan_codes_are_refused(name: str, code: int, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], SHAPES, change=edit("up.weight", set_element(700, code)))
    with pytest.raises(WeightsError, match=r"up\.weight contains NaN"):
        files.load_rows()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8-tensor", "ct-int8", "awq", "gptq", "ct-w4a16"])
def test_scales_that_are_not_finite_are_refused(name: str, value: float, tmp_path: Path) -> None:
    scale = f"up.{FORMATS[name].scale_name}"
    files = write_layers(tmp_path, FORMATS[name], SHAPES, change=edit(scale, set_element(0, value)))
    with pytest.raises(WeightsError, match=rf"{scale} contains infinite numbers or NaN"):
        files.load_rows()


def test_scales_of_eight_bits_may_not_be_nan(tmp_path: Path) -> None:
    change = edit("up.weight_scale_inv", set_element(0, 0xFF))
    files = write_layers(tmp_path, FORMATS["fp8-ue8m0"], SHAPES, change=change)
    with pytest.raises(WeightsError, match=r"up\.weight_scale_inv contains infinite numbers or NaN"):
        files.load_rows()


def test_negative_scales_are_exact(tmp_path: Path) -> None:
    """AutoRound writes them for weights whose range is larger on the negative side."""
    files = write_layers(tmp_path, FORMATS["gptq"], SHAPES, change=edit("up.scales", lambda scales: -scales))
    restored = files.load_rows().weight.dequantize()
    assert torch.equal(restored, torch.cat((files.weights["gate"], -files.weights["up"])))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", edit("up.scales", lambda scales: None), r"missing: up\.scales"),
        ("awq", edit("up.qzeros", lambda zeros: None), r"missing: up\.qzeros"),
        ("gptq-act-order", edit("up.g_idx", lambda groups: None), r"missing: up\.g_idx"),
        ("gptq-act-order", edit("up.g_idx", lambda groups: groups + 1), r"up\.g_idx names groups outside 0"),
        ("gptq-32", edit("up.g_idx", lambda groups: groups.flip(0)), r"up\.g_idx orders columns"),
        ("fp8-tensor", edit("up.weight", lambda codes: codes.to(torch.bfloat16)), r"up\.weight is BF16"),
        ("ct-fp8-channel", edit("up.weight_scale", lambda s: s[:, 0]), ""),
        ("ct-fp8-channel", edit("up.weight_scale", lambda s: s[:3]), r"shape \[3, 1\].*implies \[128, 1\]"),
        ("fp8-tensor", edit("up.weight_scale", lambda scale: scale[None]), ""),
        ("gptq", edit("up.qzeros", lambda zeros: None), ""),
        ("gptq-v2-asymmetric", edit("up.qzeros", lambda zeros: None), r"missing: up\.qzeros"),
        ("ct-w4a16", edit("up.weight_shape", lambda shape: None), ""),
        ("ct-int8-static", edit("up.input_scale", lambda scale: scale * 0), "input_scale must be a positive"),
    ],
)
def test_tensors_may_have_variants_but_no_errors(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    files = write_layers(tmp_path, FORMATS[name], SHAPES, change=change)
    if message:
        with pytest.raises(WeightsError, match=message):
            files.load_rows()
    else:
        expected = torch.cat(list(files.weights.values()))
        assert torch.equal(files.load_rows().weight.dequantize(), expected)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize(
    ("name", "suffix", "dtype"),
    [
        ("gptq", "bias", torch.float16),
        ("ct-int8", "weight_zero_point", torch.int8),
        ("ct-fp8-channel", "weight_zero_point", torch.float8_e4m3fn),
    ],
)
def test_tensors_that_exporters_add_may_only_be_zero(
    name: str, suffix: str, dtype: torch.dtype, value: int, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"up.{suffix}"] = torch.full((128,), float(value)).to(dtype)

    files = write_layers(tmp_path, FORMATS[name], SHAPES, change=change)
    if value:
        with pytest.raises(WeightsError, match=rf"unexpected: up\.{suffix}"):
            files.load_rows()
    else:
        files.load_rows()


def test_static_scales_of_inputs_are_merged_to_the_largest(tmp_path: Path) -> None:
    change = edit("up.input_scale", lambda scale: scale * 3)
    files = write_layers(tmp_path, FORMATS["ct-fp8-tensor-static"], SHAPES, change=change)
    stored = load_file(tmp_path / "model.safetensors")
    weight = files.load_rows().weight
    assert weight.activations is not None and weight.activations.scales is ActivationScales.STATIC
    assert weight.input_scale == max(float(stored[f"{name}.input_scale"]) for name in SHAPES)


def same_order(tensors: dict[str, torch.Tensor]) -> None:
    """Let all layers have the groups of the first, as real checkpoints do."""
    tensors["up.g_idx"] = tensors["gate.g_idx"].clone()


def test_columns_in_activation_order_are_sorted_by_group(tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS["gptq-act-order"], SHAPES, change=same_order)
    weight = files.load_rows().weight
    assert weight.order is not None and sorted(weight.order.tolist()) == list(range(128))
    assert (weight.column_step, weight.scales.shape) == (32, (384, 4))
    assert torch.equal(restore(files.load_rows(), 128)[:256], files.weights["gate"])


def test_groups_that_are_divided_among_ranks_are_filled_up(tmp_path: Path) -> None:
    packed = Gptq(group_size=128, symmetric=False, act_order=True)
    files = write_layers(tmp_path, packed, {"down": (64, 1024)})
    for rank in range(2):
        method = files.load_columns(rank, 2)
        weight = method.weight
        assert weight.column_step == 32 and 512 < weight.columns <= 1024 and weight.columns % 32 == 0
        assert torch.equal(restore(method, 512), files.weights["down"].chunk(2, dim=1)[rank])
        x = torch.randn(3, 512)
        expected = x @ files.weights["down"].chunk(2, dim=1)[rank].t()
        torch.testing.assert_close(method.apply(x), expected, atol=1e-4, rtol=1e-4)


def test_the_order_of_groups_in_sequence_is_no_permutation(tmp_path: Path) -> None:
    change = edit("down.g_idx", lambda groups: groups.sort().values)
    files = write_layers(tmp_path, FORMATS["gptq-act-order"], {"down": (64, 128)}, change=change)
    weight = files.load_columns().weight
    assert weight.order is None and weight.column_step == 32


@pytest.mark.parametrize(
    ("name", "codes", "scales", "has_zeros"),
    [
        ("fp8-blocks", Codes.E4M3, torch.float32, False),
        ("ct-int8", Codes.INT8, torch.float32, False),
        ("awq", Codes.UINT4, torch.float16, True),
        ("gptq", Codes.UINT4, torch.float32, False),
        ("gptq-32", Codes.UINT4, torch.float16, False),
        ("gptq-8", Codes.UINT8, torch.float32, False),
        ("ct-w4a16-32", Codes.UINT4, torch.bfloat16, False),
        ("ct-w4a16-asymmetric", Codes.UINT4, torch.bfloat16, True),
    ],
)
def test_scales_keep_their_dtype_and_implied_zero_points_are_left_out(
    name: str, codes: Codes, scales: torch.dtype, has_zeros: bool, tmp_path: Path
) -> None:
    shapes = {"gate": (256, 128)} if name != "awq" else {"gate": (256, 256)}
    weight = write_layers(tmp_path, FORMATS[name], shapes).load_rows().weight
    assert (weight.codes, weight.scales.dtype, weight.zeros is not None) == (codes, scales, has_zeros)


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int8", "ct-w4a16", "ct-w8a16"])
def test_codes_in_order_of_rows_are_not_copied(name: str, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], SHAPES)
    totals = [shape[0] for shape in SHAPES.values()]
    rows = name_rows(list(SHAPES), totals, [slice(0, total) for total in totals])
    layer = MergedColumnParallelLinear(files.context(), rows, 128, bias=False)
    first = next(iter(layer.targets())).destination.data_ptr()
    assert files.load(layer).weight.values.data_ptr() == first


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-w4a16-act-order"])
def test_stored_tensors_are_freed(name: str, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], SHAPES)
    build = files.context()
    part = LinearPart(name="gate", first_row=0, rows=slice(0, 256), columns=slice(0, 128), shape=(256, 128))
    up = LinearPart(name="up", first_row=256, rows=slice(0, 128), columns=slice(0, 128), shape=(128, 128))
    method = build.linear(LinearKind.COLUMN, (part, up), rows=384, columns=128, bias=False)
    references = [weakref.ref(target.destination) for target in method.targets()]
    fill_dummy(method.targets(), seed=0, progress=lambda done, total: None)
    method.finish()
    assert not any(reference() for reference in references)
    assert list(method.targets()) == []


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "ct-fp8-tensor", "ct-int8", "awq-32", "gptq-32", "ct-w8a16-asymmetric"]
)
@pytest.mark.parametrize("factor", [2.0**-14, 2.0**12])
def test_rows_are_scaled_exactly(name: str, factor: float, tmp_path: Path) -> None:
    """The scales of the KV cache are folded in this way; 16 bits may be too few for the result."""
    method = write_layers(tmp_path, FORMATS[name], SHAPES).load_rows()
    before = method.weight.dequantize()
    with torch.inference_mode():
        method.scale_rows(slice(32, 200), factor)
        method.scale_rows(slice(360, None), 0.5, bias=False)
    before[32:200] *= factor
    before[360:] /= 2
    assert torch.equal(method.weight.dequantize(), before)


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int8", "awq", "gptq-8-act-order-asymmetric"])
def test_rows_are_permuted_with_their_scales(name: str, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], SHAPES, {"up": 100.0})
    method, order = files.load_rows(), torch.randperm(384)
    before = restore(method, 128)
    method.permute_rows(order)
    assert torch.equal(restore(method, 128), before[order])


@pytest.mark.parametrize(
    "name", ["ct-fp8-channel", "fp8-blocks", "awq", "gptq", "ct-w4a16", "ct-w8a16-asymmetric"]
)
@pytest.mark.parametrize("vocabulary", [96, 104, 40])
def test_heads_are_padded_with_zeros(name: str, vocabulary: int, tmp_path: Path) -> None:
    """With 40 tokens, the last of four ranks holds none."""
    files = write_layers(tmp_path, FORMATS[name], {"head": (vocabulary, 256)})
    rows = []
    for rank in range(4):
        head = Head(files.context(rank, 4), "head", vocabulary, 256)
        load_checkpoint(tmp_path, head.targets(), tied=False, progress=ignore_progress, ignored=(IGNORED,))
        head.finish()
        method = cast("DequantizedLinear", head.method)
        weight = method.weight.dequantize()
        assert len(weight) == head.vocabulary.rows and not weight[head.vocabulary.count :].any()
        rows.append(weight[: head.vocabulary.count])
        x = torch.randn(2, 256)
        torch.testing.assert_close(method.apply(x), x @ weight.t(), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat(rows), files.weights["head"])


def ignore_progress(done: int, total: int) -> None: ...


class MemoryPeak(TorchDispatchMode):
    """Measures the largest size of the storages that operations allocate and that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.older: set[int] = set()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.storages:
                self.older.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.older:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        alive = [size for reference, size in self.storages.values() if not reference.expired()]
        self.peak = max(self.peak, sum(alive))
        return result


@pytest.mark.parametrize("name", ["awq", "gptq-8", "gptq-act-order", "ct-w4a16", "fp8-blocks", "ct-int8"])
def test_conversion_needs_little_memory_besides_the_layer(name: str, tmp_path: Path) -> None:
    rows, columns = 16384, 256
    files = write_layers(tmp_path, FORMATS[name], {"o": (64, columns)})
    layer = RowParallelLinear(files.context(), "o", rows, columns, bias=False)
    fill_dummy(layer.targets(), seed=0, progress=ignore_progress)
    method = cast("DequantizedLinear", layer.method)
    with MemoryPeak() as memory:
        method.finish()
    weight = method.weight
    converted = sum(each.nbytes for each in (weight.values, weight.scales, weight.zeros) if each is not None)
    assert memory.peak < converted + rows * columns / 3, "the whole layer was unpacked"

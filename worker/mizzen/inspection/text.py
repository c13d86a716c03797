# SPDX-License-Identifier: Apache-2.0
"""Formats an inspection as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mizzen.inspection.gpus import GIB, MIB
from mizzen.inspection.inspect_model import AttentionLayers, Inspection
from mizzen.inspection.memory import MemoryFit, format_count, format_gib

NAME_WIDTH = 14
IMPLEMENTATIONS = {"native": "by the native implementation", "transformers": "through Transformers"}
ESTIMATED = (
    "the sizes are estimates, and --tensor only considers numbers of heads and widths of layers; the engine "
    "checks the model's code and plan for tensor parallelism when it starts, and inspect does if PyTorch is "
    "installed"
)
CHECKED = "the model's code and its plan for tensor parallelism were checked, as when the engine starts"


def format_inspection(result: Inspection) -> str:
    """Return the lines that `mizzen inspect` prints."""
    return "\n".join(_lines(result))


def _lines(result: Inspection) -> Iterator[str]:
    if not result.served:
        yield f"{result.model}: not served"
        yield from _row("architecture", ", ".join(result.architectures))
        yield from _row("reason", result.reason)
        yield from _format_rows(result)
        return
    part = ", text only: images are rejected" if result.text_only else ""
    yield f"{result.model}: served {IMPLEMENTATIONS[result.implementation]}{part}"
    family = f" ({result.family})" if result.family else ""
    yield from _row("architecture", ", ".join(result.architectures) + family)
    yield from _row("task", _describe_task(result))
    yield from _row("features", "; ".join(result.features))
    if result.implementation == "transformers":
        yield from _row("note", ESTIMATED if result.estimated else CHECKED)
    yield from _weight_rows(result)
    yield from _row("images", _describe_images(result))
    yield from _row("layers", ", ".join(_describe_layers(layers) for layers in result.layers))
    if result.kv_bytes_per_token:
        yield from _row("KV cache", f"{result.kv_bytes_per_token / 1024:,.4g} KiB a token")
        yield from _row("context", f"{result.context_length:,} tokens")
    else:
        yield from _row("KV cache", "none: each prompt is computed in one step")
        yield from _row("prompt", f"at most {result.context_length:,} tokens")
    possible = [str(size.tensor) for size in result.tensor_sizes if size.possible]
    yield from _row("--tensor", ", ".join(possible) or "none of the wanted numbers")
    for size in result.tensor_sizes:
        if not size.possible:
            yield from _row("", f"not {size.tensor}: {size.reason}")
    if any(size.expert > 1 for size in result.tensor_sizes):
        yield from _row("--expert", _describe_expert_groups(result))
    if result.memory_fits:
        yield ""
        yield from _fit_table(result)


def _describe_task(result: Inspection) -> str:
    if result.task == "classify":
        count = len(result.labels)
        return (
            f"classification with {count} labels" if count > 1 else "classification or reranking, one label"
        )
    return "text generation" if result.task == "generate" else "embeddings"


def _describe_images(result: Inspection) -> str:
    images = result.images
    if images is None:
        return ""
    source = ", by the defaults of its processor," if images.estimated else ""
    tiles = f"{images.largest_tiles} tiles of " if images.largest_tiles > 1 else ""
    size = f"{tiles}{images.largest_width:,} x {images.largest_height:,} pixels"
    return (
        f"encoder {images.tower} with {format_count(images.parameters)} parameters "
        f"({_format_size(images.weight_bytes)}); the largest image{source} has {size} and replaces "
        f"{images.largest_embeddings:,} tokens"
    )


def _weight_rows(result: Inspection) -> Iterator[str]:
    if not result.parameters:
        yield from _row("parameters", "unknown without the files of the weights, and so is the memory needed")
        return
    count, active = result.parameters, result.active_parameters
    used = f"; a token uses {format_count(active)}" if 0 < active < count else ""
    yield from _row("parameters", f"{format_count(count)} ({count:,}){used}")
    if result.quantization:
        yield from _format_rows(result)
        yield from _row("in memory", f"{_format_size(result.weight_bytes)} of weights")
        return
    files = "no files found, computed from config.json"
    if result.file_bytes is not None:
        files = f"{_format_size(result.file_bytes)} of safetensors files"
    yield from _row("weights", f"{_format_size(result.weight_bytes)} in {result.dtype} ({files})")


def _format_rows(result: Inspection) -> Iterator[str]:
    yield from _row("quantization", result.quantization)
    for index, each in enumerate(result.weight_formats):
        count = f", {format_count(each.parameters)} parameters" if each.parameters else ""
        yield from _row("" if index else "weights", f"{_format_size(each.size)} in {each.format}{count}")


def _format_size(size: float) -> str:
    """Format a number of bytes in GiB, or in MiB if that is below 0.1 GiB."""
    return f"{size / MIB:.1f} MiB" if size < GIB / 10 else format_gib(size)


def _row(name: str, value: str) -> Iterator[str]:
    if value:
        yield f"  {name:{NAME_WIDTH}}{value}"


def _describe_layers(layers: AttentionLayers) -> str:
    side = "" if layers.kv_bytes_per_token else " to each side"
    window = f"a window of {layers.window:,} tokens{side}" if layers.window else "full attention"
    return f"{layers.count} with {window}"


def _describe_expert_groups(result: Inspection) -> str:
    return "; ".join(
        f"{size.expert} with --tensor {size.tensor}, since the width of the experts cannot be divided further"
        for size in result.tensor_sizes
        if size.expert > 1
    )


def _fit_table(result: Inspection) -> Iterator[str]:
    if not result.kv_bytes_per_token:
        yield from _encoder_fit(result)
        return
    yield f"on {result.gpu}, for each GPU:"
    heads = ("--tensor", "weights", "KV cache", "KV tokens", "longest request", "requests of full length")
    rows = [
        (
            str(fit.tensor),
            _format_size(fit.weight_bytes),
            _format_size(fit.kv_bytes),
            f"{fit.kv_tokens:,}",
            f"{fit.longest_request:,}",
            f"{fit.full_requests:,}",
        )
        for fit in result.memory_fits
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        yield "  " + _join(row, widths)
    if first := next((fit for fit in result.memory_fits if fit.fits), None):
        yield from _advice(first)
    for fit in result.memory_fits:
        if not fit.fits:
            yield f"  does not fit with --tensor {fit.tensor}: {fit.message}"


def _encoder_fit(result: Inspection) -> Iterator[str]:
    for fit in result.memory_fits:
        weights, step = _format_size(fit.weight_bytes), _format_size(fit.step_bytes)
        yield f"on {result.gpu}: {weights} of weights and {step} for a step"
        if not fit.fits:
            yield f"  does not fit: {fit.message}"


def _join(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))


def _advice(fit: MemoryFit) -> Iterator[str]:
    if fit.advice:
        yield f"  with --tensor {fit.tensor}, {fit.advice}"

# SPDX-License-Identifier: Apache-2.0
"""Generate the tables of docs/sizing.md with the code of `mizzen inspect`.

    python scripts/sizing_tables.py

The facts about models come from tests/inspection/known_models.json. A test checks that the page is up to
date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from generated_pages import ROOT, read_page, replace_part, write_pages

from mizzen.engine.config import EngineOptions
from mizzen.inspection.gpus import GIB, GPUS, gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.memory import MemoryFit, format_count
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields

PAGE = "docs/sizing.md"
MODELS: dict[str, Any] = json.loads((ROOT / "tests/inspection/known_models.json").read_text(encoding="utf-8"))
SIZED = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-14B",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "google/gemma-3-27b-it",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)
"""Models of the first table, by number of parameters."""
PLACED = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct")
"""Models of the second table."""
CARDS = ("l4", "a10", "l40s", "a100-40gb", "a100-80gb", "h100", "h200", "b200")
CONTEXT = 8192
"""Length of the requests that the second table counts, in tokens."""


def inspect(
    name: str, gpu: str = "h100", kv_cache_dtype: str = "auto", quantization: str = "auto"
) -> Inspection:
    """Return what `mizzen inspect NAME --gpu GPU` computes from config.json alone."""
    options = EngineOptions(model=name, kv_cache_dtype=kv_cache_dtype, quantization=quantization)
    files = ModelFiles(name=name, fields=Fields(MODELS[name]["config"]))
    return inspect_model(files, options, gpu=gpu, memory=gpu_bytes(gpu))


def model_rows() -> Iterable[str]:
    """Yield the table of weights and KV by model."""
    yield (
        "| model | parameters | weights (bf16) | FP8 | 4 bits | KV of a token (bf16) | KV of 8,192 tokens "
        "| `--tensor` |"
    )
    yield "|---" * 8 + "|"
    for name in SIZED:
        result = inspect(name)
        sizes = [inspect(name, quantization=option).weight_bytes / GIB for option in ("auto", "fp8", "w4a16")]
        kv = result.kv_bytes_per_token
        possible = ", ".join(str(size.tensor) for size in result.tensor_sizes if size.possible)
        yield (
            f"| `{name}` | {format_count(result.parameters)} | "
            f"{' | '.join(f'{size:.1f} GiB' for size in sizes)} "
            f"| {kv // 1024} KiB | {kv * CONTEXT / GIB:.2f} GiB "
            f"| {possible} |"
        )


def smallest_fit(result: Inspection) -> MemoryFit | None:
    """Return the fit with the fewest GPUs that hold a request of `CONTEXT` tokens, or None."""
    return next((fit for fit in result.memory_fits if fit.kv_tokens >= CONTEXT), None)


def gpu_rows() -> Iterable[str]:
    """Yield the table of GPUs, tokens and requests by model and kind of GPU."""
    yield "| GPU (memory) | " + " | ".join(f"`{name.split('/')[1]}`" for name in PLACED) + " |"
    yield "|---" * (len(PLACED) + 1) + "|"
    for gpu in CARDS:
        cells = []
        for name in PLACED:
            fit, small = smallest_fit(inspect(name, gpu)), smallest_fit(inspect(name, gpu, "fp8"))
            if fit is None or small is None:
                cells.append("more than 8 GPUs")
                continue
            fp8 = f"FP8: {small.kv_tokens // CONTEXT:,}"
            if small.tensor != fit.tensor:
                fp8 += f" on {small.tensor}"
            cells.append(
                f"**{fit.tensor}**; {fit.kv_tokens:,} tokens; {fit.kv_tokens // CONTEXT:,} requests ({fp8})"
            )
        yield f"| `{gpu}` ({GPUS[gpu]:g} GiB) | " + " | ".join(cells) + " |"


TABLES = {"weights and KV": model_rows, "GPUs": gpu_rows}


def sizing_page() -> str:
    """Return the text of docs/sizing.md: its handwritten parts, and the generated tables between marks."""
    text = read_page(PAGE)
    for name, rows in TABLES.items():
        begin = f"<!-- scripts/sizing_tables.py generates the table below: {name} -->"
        end = f"<!-- end of the table: {name} -->"
        text = replace_part(text, begin, rows(), end)
    return text


PAGES = {PAGE: sizing_page}

if __name__ == "__main__":
    write_pages(PAGES)

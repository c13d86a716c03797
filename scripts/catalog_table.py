# SPDX-License-Identifier: Apache-2.0
"""Generate the table of docs/catalog.md from the catalog's values, with the code of `mizzen inspect`.

    python scripts/catalog_table.py

The models' configurations come from tests/inspection/known_models.json and tests/chart/catalog_models.json.
A test checks that the page is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from generated_pages import ROOT, read_page, replace_part, write_pages

from mizzen.engine.config import EngineOptions
from mizzen.inspection.gpus import GIB, gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields

PAGE = "docs/catalog.md"
VALUES = "charts/mizzen-models/values.yaml"
CONFIGS = ("tests/inspection/known_models.json", "tests/chart/catalog_models.json")
BEGIN = "<!-- scripts/catalog_table.py generates the table below -->"
END = "<!-- end of the generated table -->"


@dataclass(frozen=True)
class Entry:
    """An entry of the catalog.

    Attributes:
        name: name of the entry.
        model: name of the model on the hub.
        gpu: kind of GPU.
        tensor: number of GPUs.
        context: limit of prompt and output tokens that the entry sets; None for the model's own limit.
        token: whether the hub requires a token.
    """

    name: str
    model: str
    gpu: str
    tensor: int
    context: int | None
    token: bool


def read_entries() -> Iterator[Entry]:
    """Yield the entries of the catalog, in the order of the file."""
    values = yaml.safe_load((ROOT / VALUES).read_text(encoding="utf-8"))
    for name, entry in values["catalog"].items():
        spec = entry["spec"]
        yield Entry(
            name=name,
            model=spec["model"]["source"].removeprefix("hf://"),
            gpu=entry["accelerator"],
            tensor=spec.get("parallelism", {}).get("tensor", 1),
            context=spec["model"].get("contextLength"),
            token=entry.get("token", False),
        )


def read_configs() -> dict[str, Any]:
    """Return the config.json of each known model, by its name on the hub."""
    configs: dict[str, Any] = {}
    for path in CONFIGS:
        models = json.loads((ROOT / path).read_text(encoding="utf-8"))
        configs |= {name: model["config"] for name, model in models.items()}
    return configs


def inspect(entry: Entry, config: dict[str, Any]) -> Inspection:
    """Return what `mizzen inspect` computes for an entry from the model's config.json.

    Raises:
        ValueError: the model is not served, or cannot be shared by this number of GPUs.
    """
    options = EngineOptions(model=entry.model, context_length=entry.context)
    files = ModelFiles(name=entry.model, fields=Fields(config))
    memory = gpu_bytes(entry.gpu)
    result = inspect_model(files, options, tensors=(entry.tensor,), gpu=entry.gpu, memory=memory)
    if not result.memory_fits:
        raise ValueError(f"{entry.name}: {result.reason or result.tensor_sizes[0].reason}")
    return result


def table() -> Iterable[str]:
    """Yield the lines of the table of entries."""
    configs = read_configs()
    yield "| entry | model | GPUs | context (tokens) | weights | KV cache (tokens) | token |"
    yield "|---|---|---|---|---|---|---|"
    for entry in read_entries():
        result = inspect(entry, configs[entry.model])
        [fit] = result.memory_fits
        yield (
            f"| `{entry.name}` | `{entry.model}` | {entry.tensor} × {entry.gpu.upper()} "
            f"| {entry.context or result.context_length:,} | {result.weight_bytes / GIB:.1f} GiB "
            f"| {fit.kv_tokens:,} | {'yes' if entry.token else ''} |"
        )


def catalog_page() -> str:
    """Return the text of docs/catalog.md: its handwritten parts, and the generated table between marks."""
    return replace_part(read_page(PAGE), BEGIN, table(), END)


PAGES = {PAGE: catalog_page}

if __name__ == "__main__":
    write_pages(PAGES)

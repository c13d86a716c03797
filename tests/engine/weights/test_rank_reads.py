# SPDX-License-Identifier: Apache-2.0
"""Each rank reads only its own bytes of a checkpoint, each once; together, the ranks read every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mizzen.layers.context import BuildContext
from mizzen.layers.sharding import Axis, Mesh
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.base import DecoderModel
from mizzen.models.registry import read_config
from mizzen.weights import stream as streaming
from mizzen.weights.stream import FileRange, SafetensorsHeader

KV_HEADS = 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def targets_of(folder: Path, rank: int, ranks: int) -> list[WeightTarget]:
    """Return the weight targets of a rank of the model, in float32."""
    communicator: Any = SimpleNamespace(rank=rank, size=ranks)
    mesh = Mesh(Axis(rank, ranks))
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, mesh=mesh, collectives=communicator)
    return [
        target for target in DecoderModel(build, read_config(folder)).targets() if target.destination.numel()
    ]


def holders(name: str, ranks: int) -> int:
    """Return how many ranks hold each element of a tensor."""
    if "norm" in name:
        return ranks
    return max(1, ranks // KV_HEADS) if ".k_proj." in name or ".v_proj." in name else 1


def read_by(pieces: list[FileRange], size: int, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.int64]:
    """Stream file ranges; return how often each byte of the file was read, [size]."""
    counts = np.zeros(size, np.int64)

    def read(descriptor: int, parts: Sequence[memoryview], start: int, path: Path) -> None:
        counts[start : start + sum(map(len, parts))] += 1

    monkeypatch.setattr(streaming, "read_exactly", read)
    monkeypatch.setattr(streaming, "THREADS", 1)  # incrementing the counts is not atomic
    streaming.stream_to_device(pieces, lambda done: None)
    return counts


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_read_only_their_own_bytes(
    family: str, ranks: int, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SHORT_RUN", 0)  # bytes between short runs are read as well
    heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "intermediate_size": 48}
    kit.save_model(tmp_path, family, vocab_size=157, **heads, **FAMILIES[family])
    path = tmp_path / "model.safetensors"
    header, size = SafetensorsHeader(path), path.stat().st_size
    each = []
    for rank in range(ranks):
        pieces = [header.file_range(target) for target in targets_of(tmp_path, rank, ranks)]
        assert None not in pieces, "a shard is read as a whole tensor"
        each.append(read_by([piece for piece in pieces if piece], size, monkeypatch))
    assert max(counts.max() for counts in each) == 1
    times = np.sum(each, 0)
    for name, entry in header.entries.items():
        if name == "__metadata__":
            continue
        begin, end = (header.data + offset for offset in entry["data_offsets"])
        assert set(times[begin:end].tolist()) == {holders(name, ranks)}, name
    assert not times[: header.data].any()

# SPDX-License-Identifier: Apache-2.0
"""Fixtures for fetches: model servers, the files of a model, and a function that fetches a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import model_servers
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.run import Fetch
from mizzen.fetch.store import Manifest
from oci_registry import Registry

KIB = 1024


@pytest.fixture(scope="session")
def servers() -> Any:
    return model_servers


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between retries."""
    monkeypatch.setattr("mizzen.fetch.client.FIRST_PAUSE_SECONDS", 0.01)


def blob(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(name="blob")
def blob_fixture() -> Callable[..., bytes]:
    return blob


@pytest.fixture
def model() -> dict[str, bytes]:
    """Return the files of a model, including some that the default filter excludes."""
    return {
        "config.json": b'{"model_type": "tiny"}',
        "tokenizer.json": blob(3 * KIB, 1),
        "model-00001-of-00002.safetensors": blob(300 * KIB + 17, 2),
        "model-00002-of-00002.safetensors": blob(200 * KIB, 3),
        "sub/empty.txt": b"",
        "pytorch_model.bin": blob(64 * KIB, 4),
        "original/model.safetensors": blob(64 * KIB, 5),
        ".gitattributes": b"* text",
        "README.md": b"# Tiny",
    }


EXPECTED_FILES = frozenset(
    {
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "sub/empty.txt",
    }
)


@pytest.fixture
def expected_files(model: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of the model that the default filter selects."""
    return {name: data for name, data in model.items() if name in EXPECTED_FILES}


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., Manifest]:
    """Return a function that fetches a model into `tmp_path / "to"` in small segments."""

    def run(uri: str, to: Path | None = None, **options: Any) -> Manifest:
        config = FetchConfig(**{"connections": 3, "attempts": 4, "timeout_seconds": 20.0, **options})
        return Fetch(uri, to or tmp_path / "to", config, segment=64 * KIB, checkpoint=16 * KIB).run()

    return run


@pytest.fixture
def fetched_files(tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Return a function that reads the fetched files, without those named `.mizzen*`."""

    def read(to: Path | None = None) -> dict[str, bytes]:
        folder = to or tmp_path / "to"
        paths = [path for path in folder.rglob("*") if path.is_file()]
        contents = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return {name: data for name, data in contents.items() if not name.startswith(".mizzen")}

    return read


@pytest.fixture
def hub(servers: Any) -> Iterator[Any]:
    server = servers.Hub()
    yield server
    server.close()


@pytest.fixture
def bucket(servers: Any) -> Iterator[Any]:
    server = servers.Bucket()
    yield server
    server.close()


@pytest.fixture
def registry(servers: Any) -> Iterator[Any]:
    server = Registry()
    yield server
    server.close()

# SPDX-License-Identifier: Apache-2.0
"""Image decoders whose processes can import the rules of `decoder_kit`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.options import DecoderOptions

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)
sys.path.insert(0, str(Path(__file__).parents[2] / "images"))  # files and rules


@pytest.fixture
def make_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ImageDecoder]]:
    """Yield a function that makes a decoder from options; the decoders are closed after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")]))
    decoders: list[ImageDecoder] = []

    def make(on_result: Callable[[], None] | None = None, **options: object) -> ImageDecoder:
        decoders.append(ImageDecoder(DecoderOptions(**{"processes": 1, **options}), on_result))  # pyright: ignore[reportArgumentType]
        return decoders[-1]

    yield make
    for decoder in decoders:
        decoder.close()

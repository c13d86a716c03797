# SPDX-License-Identifier: Apache-2.0
"""Pixels of decoded images equal those of Transformers' PIL image processors; damaged files are refused."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from image_files import MODES, orientation_exif, png_chunk, write_deep_png, write_image
from model_files import CLIP, QWEN, make_rules, qwen_rules
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mizzen.images.decode import MAX_IMAGE_PIXELS, decode_image
from mizzen.images.header import read_header
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits

Processor = Callable[[Image.Image], np.ndarray]
RAW: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
SQUARE = {"height": 336, "width": 336}
FORMATS = [(kind, mode) for kind, modes in MODES.items() for mode in modes]


def qwen_family(model_type: str) -> tuple[ImageRules, Processor]:
    """Return rules, and a function that returns the pixels of Transformers."""
    processor = Qwen2VLImageProcessorPil(**QWEN[model_type][1], **RAW)
    patch = QWEN[model_type][1]["patch_size"]

    def process(image: Image.Image) -> np.ndarray:
        output = processor(images=image, return_tensors="np")
        _, rows, columns = output["image_grid_thw"][0]
        patches = output["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
        frames = patches.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(2, rows * patch, columns * patch, 3)
        assert np.array_equal(frames[0], frames[1])
        return frames[:1]

    return qwen_rules(model_type), process


def square_family(make_processor: Any, **fields: Any) -> tuple[ImageRules, Processor]:
    processor = make_processor(size={"shortest_edge": 336}, crop_size=SQUARE, **fields, **RAW)
    config = {"vision_config": CLIP, "image_token_index": 32000}
    name = "llava_next" if make_processor is LlavaNextImageProcessorPil else "llava"
    rules = make_rules(name, config, {"size": {"shortest_edge": 336}, "crop_size": SQUARE, **fields})
    return rules, lambda image: _tiles(processor(images=image, return_tensors="np")["pixel_values"])


def pixtral_family() -> tuple[ImageRules, Processor]:
    edges = {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}}
    processor = PixtralImageProcessorPil(**edges, **RAW)
    vision = {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}
    tokens = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
    rules = make_rules("llava", {"vision_config": vision, "image_token_index": 10}, edges, **tokens)
    return rules, lambda image: _tiles(processor(images=image, return_tensors="np")["pixel_values"])


def _tiles(pixels: np.ndarray) -> np.ndarray:
    """Turn an array [..., 3, height, width] into tiles [tiles, height, width, 3]."""
    return pixels.reshape(-1, *pixels.shape[-3:]).transpose(0, 2, 3, 1)


FAMILIES: dict[str, Callable[[], tuple[ImageRules, Processor]]] = {
    "qwen2_vl": lambda: qwen_family("qwen2_vl"),
    "qwen3_vl": lambda: qwen_family("qwen3_vl"),
    "llava": lambda: square_family(CLIPImageProcessorPil),
    "llava_padded": lambda: square_family(LlavaImageProcessorPil, do_pad=True),
    "llava_next": lambda: square_family(LlavaNextImageProcessorPil),
    "pixtral": pixtral_family,
}


def decode(content: bytes, rules: ImageRules, limits: PixelLimits | None = None) -> np.ndarray:
    header = read_header(content)
    size = header.width, header.height
    pixels = decode_image(content, rules, size, limits)
    geometry = rules.geometry(*size, limits)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (geometry.tiles, geometry.height, geometry.width, 3)
    return pixels


def upright(content: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


def random_files(count: int, largest: int, seed: int) -> Iterator[bytes]:
    """Yield files of all formats, modes and orientations with random sizes."""
    source = random.Random(seed)
    for number in range(count):
        kind, mode = FORMATS[number % len(FORMATS)]
        options: dict[str, Any] = {}
        if kind != "GIF":
            options["exif"] = orientation_exif(source.randint(1, 8))
        if kind == "JPEG":
            options |= {"progressive": source.random() < 0.5, "subsampling": source.randint(0, 2)}
        size = source.randint(1, largest), source.randint(1, largest)
        yield write_image(kind, mode, size, number, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_transformers(family: str) -> None:
    rules, process = FAMILIES[family]()
    for content in random_files(52, 480, seed=len(family)):
        np.testing.assert_array_equal(decode(content, rules), process(upright(content)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright_before_they_are_resized(kind: str, orientation: int) -> None:
    rules, process = FAMILIES["qwen2_vl"]()
    content = write_image(kind, "RGB", (150, 91), exif=orientation_exif(orientation))
    np.testing.assert_array_equal(decode(content, rules), process(upright(content)))


@pytest.mark.parametrize("size", [(1, 2), (1, 200), (200, 1), (2500, 13), (2100, 1700), (64, 64)])
def test_extreme_sizes_have_the_pixels_of_transformers(size: tuple[int, int]) -> None:
    rules, process = FAMILIES["qwen2_vl"]()
    content = write_image("JPEG", "RGB", size)
    np.testing.assert_array_equal(decode(content, rules), process(upright(content)))


def test_limits_of_a_request_change_the_size() -> None:
    rules, _ = FAMILIES["qwen2_vl"]()
    content = write_image("PNG", "RGB", (500, 300))
    assert decode(content, rules, PixelLimits(max_pixels=28 * 28 * 20)).shape == (1, 84, 140, 3)


@pytest.mark.parametrize(("kind", "mode"), FORMATS)
def test_a_cut_file_is_refused_or_has_all_pixels(kind: str, mode: str) -> None:
    """All pixels are there if only what follows the image data is cut, such as the end marker of GIF."""
    rules, _ = FAMILIES["qwen2_vl"]()
    content = write_image(kind, mode, (37, 29))
    header, complete, refused = read_header(content), decode(content, rules), 0
    for length in [
        *range(0, len(content), max(1, len(content) // 60)),
        *range(len(content) - 30, len(content)),
    ]:
        try:
            pixels = decode_image(content[:length], rules, (header.width, header.height), None)
        except InvalidImage as error:
            assert str(error).startswith("the image ")
            refused += 1
        else:
            np.testing.assert_array_equal(pixels, complete)
    assert refused >= 50 if mode != "frames" else refused >= 15


def bombs() -> dict[str, bytes]:
    """Return small files whose headers have huge sizes, and one that expands to many pixels."""
    png = struct.pack(">LLBBBBB", 50_000, 50_000, 1, 0, 0, 0, 0)
    gif = bytearray(write_image("GIF", "P", (8, 8)))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    vp8x = b"VP8X" + struct.pack("<L", 10) + b"\0" * 4 + (16383).to_bytes(3, "little") * 2
    webp = vp8x + write_image("WEBP", "RGB", (8, 8))[12:]
    jpeg = bytearray(write_image("JPEG", "RGB", (8, 8)))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    blank = io.BytesIO()
    Image.new("1", (8100, 8100)).save(blank, "PNG")
    return {
        "png": b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", png)
        + png_chunk(b"IDAT", b"x")
        + png_chunk(b"IEND", b""),
        "gif": bytes(gif),
        "webp": b"RIFF" + struct.pack("<L", len(webp) + 4) + b"WEBP" + webp,
        "jpeg": bytes(jpeg),
        "blank": blank.getvalue(),
    }


@pytest.mark.parametrize("name", bombs())
def test_images_with_too_many_pixels_are_refused_before_they_are_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, _ = FAMILIES["qwen2_vl"]()
    content = bombs()[name]
    header = read_header(content)
    size = header.width, header.height
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the file was opened"))
    with pytest.raises(InvalidImage, match=f"{size[0]} x {size[1]} pixels.*{MAX_IMAGE_PIXELS}"):
        decode_image(content, rules, size, None)


def test_a_size_other_than_that_of_the_header_is_refused() -> None:
    rules, _ = FAMILIES["qwen2_vl"]()
    content = write_image("PNG", "RGB", (40, 30))
    for size in ((40, 31), (30, 40)):
        with pytest.raises(InvalidImage, match=rf"40 x 30 pixels, but its header says {size[0]} x {size[1]}"):
            decode_image(content, rules, size, None)


def test_narrow_images_are_refused() -> None:
    rules, _ = FAMILIES["qwen2_vl"]()
    with pytest.raises(InvalidImage, match="200 times"):
        decode_image(write_image("PNG", "L", (1, 10_000)), rules, (1, 10_000), None)


def test_other_formats_are_refused() -> None:
    """Pillow could read these: their decoders are never used."""
    rules, _ = FAMILIES["qwen2_vl"]()
    for kind in ("BMP", "TIFF", "PPM", "ICO", "TGA"):
        with pytest.raises(InvalidImage, match="unknown format: send a JPEG, PNG, WebP or GIF file"):
            decode_image(write_image(kind, "RGB", (40, 30)), rules, (40, 30), None)


def test_errors_contain_no_text_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("<_io.BytesIO object at 0x7f0123456789>")

    rules, _ = FAMILIES["qwen2_vl"]()
    content = write_image("PNG", "RGB", (40, 30))
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(InvalidImage) as caught:
        decode_image(content, rules, (40, 30), None)
    assert str(caught.value) == "the image cannot be decoded, because its file is damaged or incomplete"
    assert caught.value.__cause__ is None


def test_images_with_16_bits_per_value_are_read() -> None:
    """Pillow keeps the upper 8 bits of the values of colors."""
    rules, process = FAMILIES["qwen2_vl"]()
    content = write_deep_png("RGB16", (56, 56), np.random.default_rng(1))
    np.testing.assert_array_equal(decode(content, rules), process(upright(content)))
    assert len(np.unique(decode(content, rules))) > 200

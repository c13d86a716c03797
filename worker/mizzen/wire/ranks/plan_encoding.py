# SPDX-License-Identifier: Apache-2.0
"""Encodes step plans as bytes for the other ranks: one header, then packed columns.

    magic, checksum, step, decode_version, sizes   (HEADER, little-endian)
    decode | page slots, columns, pages | starts | chunk heads | chunk tokens   (arrays)
    heads of chunk images | offsets of chunk images | rotary positions | encodings | dropped digests

Only rank 0 samples tokens; the other ranks receive the tokens on the device. The encoded start of a slot
therefore omits sampling parameters and known tokens: it holds only the numbers that determine which rows the
model computes and which logits it needs. Likewise only rank 0 encodes images, so that pixels are not sent.

Encoding copies a few arrays and creates no Python object per request, except for requests that start. The
decoder verifies sizes and a checksum, because a torn or foreign message must not become a plan.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from mizzen.core.images.types import DIGEST_BYTES, ChunkImage, ImageEncoding
from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan

MAGIC = 0x4D5A504C414E3034  # "MZPLAN04"
NONE = -1
"""Encoding of None in a number field; actual numbers are never negative."""

HEADER = np.dtype(
    [
        ("magic", "<i8"),
        ("checksum", "<i8"),
        ("step", "<i8"),
        ("decode_version", "<i8"),
        ("decode", "<i4"),
        ("pages", "<i4"),
        ("starts", "<i4"),
        ("chunks", "<i4"),
        ("tokens", "<i8"),
        ("encodings", "<i4"),
        ("dropped", "<i4"),
    ]
)
START = np.dtype(
    [
        ("slot", "<i4"),
        ("length", "<i4"),
        ("prompt_tokens", "<i4"),
        ("prompt_logprobs_from", "<i4"),
        ("rotary_offset", "<i4"),
        ("prompt_logprobs", "<i2"),
        ("pooling", "i1"),
        ("has_options", "?"),
    ]
)
CHUNK = np.dtype([("slot", "<i4"), ("start", "<i4"), ("tokens", "<i4"), ("images", "<i4"), ("flags", "<i4")])
LAST, POOLS, ROTARY = 1, 2, 4
"""Bits of the column `flags` of a chunk; `ROTARY` marks chunks with rotary positions."""
DIGEST = np.dtype(("V", DIGEST_BYTES))
IMAGE = np.dtype([("digest", DIGEST), ("first", "<i4"), ("offsets", "<i4")])
ENCODING = np.dtype([("digest", DIGEST), ("grid", "<i4", 3), ("embeddings", "<i4")])
POOLINGS = (None, *Pooling)
GREEDY = SamplingParams(temperature=0.0)
"""Placeholder for the sampling parameters in decoded plans; never used, because only rank 0 samples."""


class MalformedPlan(ValueError):
    """Received bytes are not a valid plan."""


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan as bytes, for ranks that neither sample nor encode; `decode_plan` is the inverse.

    Sampling parameters, pixels and encodings that other steps complete are left out.
    """
    starts = np.array([_start_row(start) for start in plan.starts], START)
    chunks = np.array([_chunk_row(chunk) for chunk in plan.prefill], CHUNK)
    images = [image for chunk in plan.prefill for image in chunk.images]
    encodings = [(np.void(each.digest), each.grid, each.embeddings) for each in plan.encodings if each.last]
    tokens = [_column(chunk.tokens) for chunk in plan.prefill]
    pages = plan.pages
    body = b"".join(
        (
            _column(plan.decode),
            _column(pages.slots),
            _column(pages.columns),
            _column(pages.pages),
            starts.tobytes(),
            chunks.tobytes(),
            *tokens,
            np.array([_image_row(image) for image in images], IMAGE).tobytes(),
            *(_column(image.offsets) for image in images),
            *(_column(chunk.rotary) for chunk in plan.prefill if chunk.rotary is not None),
            np.array(encodings, ENCODING).tobytes(),
            np.array([np.void(digest) for digest in plan.dropped_images], DIGEST).tobytes(),
        )
    )
    header = np.zeros((), HEADER)
    header["magic"] = MAGIC
    header["step"], header["decode_version"] = plan.step, plan.decode_version
    header["decode"], header["pages"] = len(plan.decode), len(pages.pages)
    header["starts"], header["chunks"] = len(starts), len(chunks)
    header["tokens"] = sum(map(len, tokens)) // 4
    header["encodings"], header["dropped"] = len(encodings), len(plan.dropped_images)
    header["checksum"] = _checksum(header, body)
    return header.tobytes() + body


def decode_plan(frame: bytes | memoryview) -> StepPlan:
    """Decode a plan for a rank that does not sample; its arrays are views of `frame`.

    Raises:
        MalformedPlan: the frame has the wrong length, is not a plan, or has a wrong checksum.
    """
    if len(frame) < HEADER.itemsize:
        raise MalformedPlan(f"{len(frame)} bytes are too few for a plan; its header has {HEADER.itemsize}")
    header = np.frombuffer(frame, HEADER, 1)[0].copy()
    if header["magic"] != MAGIC:
        raise MalformedPlan("not a plan: wrong magic number")
    body = memoryview(frame)[HEADER.itemsize :]
    if header["checksum"] != _checksum(header, body):
        raise MalformedPlan(f"the plan of step {header['step']} is damaged")
    reader = _Reader(body)
    decode = reader.read("<i4", header["decode"])
    pages = PageWrites(*(reader.read("<i4", header["pages"]) for _ in range(3)))
    starts, chunks = reader.read(START, header["starts"]), reader.read(CHUNK, header["chunks"])
    tokens = reader.read("<i4", header["tokens"])
    images = _images(reader, chunks["images"].sum())
    rotary = reader.read("<i4", 3 * chunks["tokens"][chunks["flags"] & ROTARY > 0].sum())
    encodings, dropped = reader.read(ENCODING, header["encodings"]), reader.read(DIGEST, header["dropped"])
    if reader.left or chunks["tokens"].sum() != len(tokens):
        raise MalformedPlan(f"the sizes of the plan of step {header['step']} do not add up")
    return StepPlan(
        step=int(header["step"]),
        decode=decode,
        decode_version=int(header["decode_version"]),
        pages=pages,
        starts=_starts(starts),
        prefill=_chunks(chunks, tokens, images, rotary),
        dropped_images=tuple(dropped.tolist()),
        encodings=tuple(
            ImageEncoding(digest=digest, grid=tuple(grid), embeddings=embeddings)
            for digest, grid, embeddings in encodings.tolist()
        ),
    )


def _checksum(header: np.ndarray | np.void, body: bytes | memoryview) -> int:
    """Return the CRC-32 of a plan: of all header fields that follow the checksum, and then the body."""
    return zlib.crc32(body, zlib.crc32(header.tobytes()[16:]))


class _Reader:
    """Reads consecutive arrays from a buffer."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._buffer) - self._at

    def read(self, kind: np.dtype | str, count: int) -> NDArray:
        size = np.dtype(kind).itemsize * int(count)
        if not 0 <= size <= self.left:
            raise MalformedPlan(f"{count} entries of {kind} do not fit")
        part = np.frombuffer(self._buffer[self._at : self._at + size], kind)
        self._at += size
        return part


def _column(values: Int32) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def _start_row(start: SlotStart) -> tuple[int, ...]:
    options = start.options
    if options is None:
        return start.slot, start.length, 0, 0, start.rotary_offset, NONE, 0, False
    logprobs = NONE if options.prompt_logprobs is None else options.prompt_logprobs
    return (
        start.slot,
        start.length,
        options.prompt_tokens,
        options.prompt_logprobs_from,
        start.rotary_offset,
        logprobs,
        POOLINGS.index(options.pooling),
        True,
    )


def _starts(rows: NDArray) -> tuple[SlotStart, ...]:
    return tuple(
        SlotStart(
            slot=slot,
            length=length,
            sampling=GREEDY,
            seed=0,
            rotary_offset=rotary_offset,
            options=SlotOptions(
                tokens=np.broadcast_to(np.int32(0), prompt_tokens),
                prompt_tokens=prompt_tokens,
                prompt_logprobs=None if logprobs == NONE else logprobs,
                prompt_logprobs_from=first,
                pooling=POOLINGS[pooling],
            )
            if has_options
            else None,
        )
        for slot, length, prompt_tokens, first, rotary_offset, logprobs, pooling, has_options in rows.tolist()
    )


def _chunk_row(chunk: PrefillChunk) -> tuple[int, ...]:
    flags = LAST * chunk.last | POOLS * chunk.pools | ROTARY * (chunk.rotary is not None)
    return chunk.slot, chunk.start, len(chunk.tokens), len(chunk.images), flags


def _image_row(image: ChunkImage) -> tuple[np.void, int, int]:
    return np.void(image.digest), image.first, len(image.offsets)


def _images(reader: _Reader, count: int) -> list[ChunkImage]:
    heads = reader.read(IMAGE, count)
    offsets = reader.read("<i4", heads["offsets"].sum())
    parts = np.split(offsets, np.cumsum(heads["offsets"])[:-1]) if count else []
    return [
        ChunkImage(digest=digest, first=first, offsets=part)
        for (digest, first, _), part in zip(heads.tolist(), parts, strict=True)
    ]


def _chunks(
    rows: NDArray, tokens: Int32, images: list[ChunkImage], rotary: Int32
) -> tuple[PrefillChunk, ...]:
    chunks, at, image, rotary_at = [], 0, 0, 0
    for slot, start, count, image_count, flags in rows.tolist():
        positions = None
        if flags & ROTARY:
            positions = rotary[rotary_at : rotary_at + 3 * count].reshape(3, count)
            rotary_at += 3 * count
        chunks.append(
            PrefillChunk(
                slot=slot,
                start=start,
                tokens=tokens[at : at + count],
                last=bool(flags & LAST),
                images=tuple(images[image : image + image_count]),
                rotary=positions,
                pools=bool(flags & POOLS),
            )
        )
        at += count
        image += image_count
    return tuple(chunks)

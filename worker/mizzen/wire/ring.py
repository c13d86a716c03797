"""Plans on their way from rank 0 to the other ranks, as bytes: one header, then packed columns.

    magic, checksum, step, decode_version, sizes   (HEADER, little-endian)
    decode | page slots, columns, pages | starts | chunk heads | chunk tokens | stop tokens   (arrays)

A plan costs a handful of copies and no Python object a request, except where requests start. A rank decodes
what rank 0 encoded; both are the same program, but a torn or foreign message must not become a plan, so sizes
and a checksum are checked.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from mizzen.core.params import SamplingParams
from mizzen.core.plan import PageWrites, PrefillChunk, SlotStart, StepPlan
from mizzen.core.request import Int32

MAGIC = 0x4D5A504C414E3031  # "MZPLAN01"
NONE = -1
"""Stands for an absent max_tokens, which is 1 or more."""

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
        ("stops", "<i8"),
    ]
)
START = np.dtype(
    [
        ("slot", "<i4"),
        ("length", "<i4"),
        ("seed", "<u8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("sampling_seed", "<u8"),
        ("max_tokens", "<i8"),
        ("top_k", "<i8"),
        ("stops", "<i4"),
        ("seed_kind", "u1"),
        ("ignore_eos", "?"),
        ("padding", "<u2"),
    ]
)
CHUNK = np.dtype([("slot", "<i4"), ("start", "<i4"), ("tokens", "<i4"), ("last", "<i4")])
_NO_SEED, _SEED, _NEGATIVE_SEED = 0, 1, 2


class MalformedPlan(ValueError):
    """Bytes are no plan."""


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan's bytes.

    Raises:
        ValueError: a start carries stop strings, which never reach the engine.
    """
    starts = np.zeros(len(plan.starts), START)
    stops: list[int] = []
    for row, start in enumerate(plan.starts):
        starts[row] = _start_row(start)
        stops += start.sampling.stop_token_ids
    chunks = np.array(
        [(chunk.slot, chunk.start, len(chunk.tokens), chunk.last) for chunk in plan.prefill], CHUNK
    )
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
            np.array(stops, "<i8").tobytes(),
        )
    )
    header = np.zeros((), HEADER)
    header["magic"] = MAGIC
    header["step"], header["decode_version"] = plan.step, plan.decode_version
    header["decode"], header["pages"] = len(plan.decode), len(pages.pages)
    header["starts"], header["chunks"] = len(starts), len(chunks)
    header["tokens"], header["stops"] = sum(map(len, tokens)) // 4, len(stops)
    header["checksum"] = _checksum(header, body)
    return header.tobytes() + body


def decode_plan(frame: bytes | memoryview) -> StepPlan:
    """Return the plan of `encode_plan`'s bytes; its arrays are read-only views of them.

    Raises:
        MalformedPlan: too short or too long, no plan, or damaged.
    """
    if len(frame) < HEADER.itemsize:
        raise MalformedPlan(f"{len(frame)} bytes are no plan; its header has {HEADER.itemsize}")
    header = np.frombuffer(frame, HEADER, 1)[0].copy()
    if header["magic"] != MAGIC:
        raise MalformedPlan("no plan: another magic number")
    body = memoryview(frame)[HEADER.itemsize :]
    if header["checksum"] != _checksum(header, body):
        raise MalformedPlan(f"the plan of step {header['step']} is damaged")
    reader = _Reader(body)
    decode = reader.take("<i4", header["decode"])
    pages = PageWrites(*(reader.take("<i4", header["pages"]) for _ in range(3)))
    starts, chunks = reader.take(START, header["starts"]), reader.take(CHUNK, header["chunks"])
    tokens, stops = reader.take("<i4", header["tokens"]), reader.take("<i8", header["stops"])
    if reader.left or chunks["tokens"].sum() != len(tokens) or starts["stops"].sum() != len(stops):
        raise MalformedPlan(f"the sizes of the plan of step {header['step']} do not add up")
    return StepPlan(
        step=int(header["step"]),
        decode=decode,
        decode_version=int(header["decode_version"]),
        pages=pages,
        starts=_starts(starts, stops),
        prefill=_chunks(chunks, tokens),
    )


def _checksum(header: np.ndarray | np.void, body: bytes | memoryview) -> int:
    """Return the CRC-32 of a plan, over its header's fields after the checksum and its body."""
    return zlib.crc32(body, zlib.crc32(header.tobytes()[16:]))


class _Reader:
    """Takes arrays from a buffer, one after another."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._buffer) - self._at

    def take(self, kind: np.dtype | str, count: int) -> NDArray:
        size = np.dtype(kind).itemsize * int(count)
        if not 0 <= size <= self.left:
            raise MalformedPlan(f"{count} entries of {kind} do not fit")
        part = np.frombuffer(self._buffer[self._at : self._at + size], kind)
        self._at += size
        return part


def _column(values: Int32) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def _start_row(start: SlotStart) -> tuple[float, ...]:
    sampling = start.sampling
    if sampling.stop:
        raise ValueError("stop strings do not go to ranks")
    seed = sampling.seed
    kind = _NO_SEED if seed is None else _NEGATIVE_SEED if seed < 0 else _SEED
    return (
        start.slot,
        start.length,
        start.seed,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        0 if seed is None else seed % 2**64,
        NONE if sampling.max_tokens is None else sampling.max_tokens,
        sampling.top_k,
        len(sampling.stop_token_ids),
        kind,
        sampling.ignore_eos,
        0,
    )


def _starts(rows: NDArray, stops: NDArray) -> tuple[SlotStart, ...]:
    starts, at = [], 0
    for row in rows.tolist():
        slot, length, seed, temperature, top_p, min_p, own_seed, most, top_k, count, kind, ignore, _ = row
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=None if kind == _NO_SEED else own_seed - 2**64 if kind == _NEGATIVE_SEED else own_seed,
            max_tokens=None if most == NONE else most,
            ignore_eos=ignore,
            stop_token_ids=tuple(stops[at : at + count].tolist()),
        )
        starts.append(SlotStart(slot=slot, length=length, sampling=sampling, seed=seed))
        at += count
    return tuple(starts)


def _chunks(rows: NDArray, tokens: Int32) -> tuple[PrefillChunk, ...]:
    chunks, at = [], 0
    for slot, start, count, last in rows.tolist():
        part = tokens[at : at + count]
        chunks.append(PrefillChunk(slot=slot, start=start, tokens=part, last=bool(last)))
        at += count
    return tuple(chunks)

# SPDX-License-Identifier: Apache-2.0
"""Unpacks words of 32 bits, in which checkpoints store integers of 4 or 8 bits."""

from __future__ import annotations

import torch

from mizzen.layers.quantized.stored_layer import StoredPart
from mizzen.quantization.schemes import PackedIntegers, Packing

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Element of a word that holds each of its eight rows, in the order of AWQ."""


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in words (int32 [count, words]), low bits first, as uint8 [count, elements]."""
    values = copy_bytes(words)
    return values if bits == 8 else unpack_pairs(values)


def copy_bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of words (int32 [rows, words]) as a new uint8 tensor [rows, 4 * words].

    Unlike `contiguous`, `clone` also gives transposed tensors with one or no word a stride of 1.
    """
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the integers in bytes (uint8 [rows, bytes]), low four bits first, as uint8 [rows, columns]."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def pack_pairs(values: torch.Tensor) -> torch.Tensor:
    """Pack integers of 4 bits (uint8 [rows, columns]) into bytes, with the even column in the low bits."""
    return values[:, 0::2] | values[:, 1::2] << 4


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return integers in AWQ's order (int32 [count, words]) as uint8 [count, elements]."""
    values = unpack_words(words, 4).view(len(words), -1, 8)
    return values[:, :, list(AWQ_PLACES)].flatten(1)


def read_codes(stored: StoredPart, scheme: PackedIntegers, rows: slice) -> torch.Tensor:
    """Return codes of some rows of a rank's shard (first row a multiple of 8), uint8 [rows, bytes].

    Codes of 4 bits are packed in pairs of columns, the even column in the low bits.
    """
    part = stored.part
    columns = (part.columns.stop - part.columns.start) * scheme.bits // 8
    match scheme.packing:
        case Packing.AWQ:
            words = stored.tensors["qweight"][:, rows.start // 8 : -(-rows.stop // 8)]
            return pack_pairs(unpack_awq(words)[:, : rows.stop - rows.start].t())
        case Packing.GPTQ | Packing.GPTQ_V2:
            words = stored.tensors["qweight"][:, rows].t()
        case Packing.COMPRESSED_TENSORS:
            words = stored.tensors["weight_packed"][rows]
    return copy_bytes(words)[:, :columns]


def read_zeros(stored: StoredPart, scheme: PackedIntegers) -> torch.Tensor | None:
    """Return the zero points of a rank's shard, uint8 [rows, groups]; None if the codes imply them."""
    match scheme.packing:
        case Packing.AWQ:
            zeros = unpack_awq(stored.tensors["qzeros"])
        case Packing.GPTQ:
            ones = sum(1 << place for place in range(0, 32, scheme.bits))
            zeros = unpack_words(stored.tensors["qzeros"] + ones, scheme.bits)  # carries as it was borrowed
        case Packing.GPTQ_V2:
            zeros = unpack_words(stored.tensors["qzeros"], scheme.bits)
        case Packing.COMPRESSED_TENSORS if scheme.symmetric:
            return None
        case Packing.COMPRESSED_TENSORS:
            zeros = unpack_words(stored.tensors["weight_zero_point"].t(), scheme.bits)
    zeros = zeros[:, : stored.rows].t()
    implied = 2 ** (scheme.bits - 1)
    return None if scheme.symmetric and bool((zeros == implied).all()) else zeros


def read_scales(stored: StoredPart, scheme: PackedIntegers) -> tuple[str, torch.Tensor]:
    """Return the name and the values of the scales of a rank's shard, float32 [rows, groups]."""
    if scheme.packing is Packing.COMPRESSED_TENSORS:
        return "weight_scale", stored.tensors["weight_scale"]
    return "scales", stored.tensors["scales"].t()

"""Device state, one row a slot: everything that a step needs besides its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.base import Pages
from mizzen.core.request import Int32, Int64
from mizzen.core.step_plan import PageWrites, SlotStart
from mizzen.engine.sampling.slot_params import SlotExtras
from mizzen.parallel.collectives import ALONE, Collectives

ALIGNMENT = 16
"""Bytes; Triton compiles kernels for operands that begin at a multiple of it, and for others."""


LEAST_TEMPERATURE = 1e-6
"""Above 0, temperatures are no lower: logits over it stay finite, and it draws the most probable anyway."""


class Uploader:
    """Brings small host arrays to the device without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device; on cpu, a tensor of the array's own memory.

        Pinned memory comes from PyTorch's caching allocator, which hands it out again only after the copy.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def each(self, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Return copies of arrays of one length, in their common dtype, brought by one copy.

        Each begins at a multiple of ALIGNMENT, whatever the length: for operands that do not, a kernel is
        compiled anew, while all streams wait.
        """
        dtype, length = np.result_type(*arrays), len(arrays[0])
        wide = ALIGNMENT // dtype.itemsize
        packed = np.zeros((len(arrays), -(-length // wide) * wide), dtype)
        packed[:, :length] = arrays
        return tuple(self(packed)[:, :length].unbind())


class Column:
    """One value a slot, on the host and on the device; on cpu they are the same memory."""

    def __init__(self, values: NDArray[Any], upload: Uploader) -> None:
        self.host = values
        self.upload = upload
        self.shared = upload.device.type == "cpu"
        self.device = torch.from_numpy(values).to(upload.device)

    def write(self, index: tuple[NDArray[Any], ...], values: NDArray[Any]) -> None:
        """Set cells by index arrays, one a dimension; the last of several writes to a cell wins."""
        self.host[index] = values
        if not self.shared:
            where = tuple(self.upload(part.astype(np.int64)) for part in index)
            # Read back, for the device keeps no order between writes to one cell.
            self.device[where] = self.upload(self.host[index])


@dataclass(frozen=True, slots=True)
class Drawing:
    """How slots draw, each [slots] on the device; see `mizzen.kernels.sampling.top_k_top_p.Parameters`."""

    temperature: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class SlotState:
    """Page table, lengths, last tokens and sampling parameters, indexed by slot.

    With a `scratch_page` there is one slot more, the last: rows that pad a batch run in it, and all its KV
    goes to that page, which no request holds.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        upload: Uploader,
        scratch_page: int | None = None,
        *,
        vocab: int = 0,
        ranks: Collectives = ALONE,
    ) -> None:
        """Allocate rows of `columns` pages; penalties need the size of the vocabulary."""
        self.ranks = ranks
        table = np.zeros((slots, columns), np.int32)
        if scratch_page is not None:
            slots += 1
            table = np.concatenate([table, np.full((1, columns), scratch_page, np.int32)])
        self.scratch = slots - 1 if scratch_page is not None else None
        """The slot of padding."""
        self.table = Column(table, upload)
        self.lengths: Int32 = np.zeros(slots, np.int32)
        """Tokens whose KV exists. The host alone needs them: a step adds a known number."""
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=upload.device)
        self.temperature = Column(np.ones(slots, np.float32), upload)
        self.top_k = Column(np.zeros(slots, np.int64), upload)
        self.top_p = Column(np.ones(slots, np.float32), upload)
        self.min_p = Column(np.zeros(slots, np.float32), upload)
        self.seed = Column(np.zeros(slots, np.int64), upload)
        columns_drawn = (self.temperature, self.seed, self.top_k, self.top_p, self.min_p)
        self.drawing = Drawing(*(column.device for column in columns_drawn))
        self.extras = SlotExtras(slots, vocab, upload)

    def agreed_tokens(self) -> torch.Tensor:
        """Return the last tokens, int64 [slots], once all ranks have rank 0's: it alone knows what was drawn.

        Every step that decodes calls it once, before it reads them.
        """
        self.ranks.broadcast(self.last_tokens)
        return self.last_tokens

    @property
    def pages(self) -> Pages:
        """The page table."""
        host: Int32 = self.table.host  # type: ignore[assignment]
        return Pages(host=host, device=self.table.device)

    def write_pages(self, writes: PageWrites) -> None:
        """Set cells of the page table."""
        if len(writes.slots):
            self.table.write((writes.slots, writes.columns), writes.pages)

    def start(self, starts: tuple[SlotStart, ...]) -> None:
        """Hand slots over to requests."""
        if not starts:
            return
        slots = np.array([start.slot for start in starts], np.int64)
        self.lengths[slots] = [start.length for start in starts]
        params = [start.sampling for start in starts]
        # Seeds are 64 bits without a sign; the device keeps the same bits with one.
        seeds = np.array([start.seed % 2**64 for start in starts], np.uint64).view(np.int64)
        temperatures = np.array([p.temperature for p in params], np.float32)
        least = np.where(temperatures > 0, LEAST_TEMPERATURE, 0).astype(np.float32)
        self.temperature.write((slots,), np.maximum(temperatures, least))
        self.top_k.write((slots,), np.array([p.top_k for p in params], np.int64))
        self.top_p.write((slots,), np.array([p.top_p for p in params], np.float32))
        self.min_p.write((slots,), np.array([p.min_p for p in params], np.float32))
        self.seed.write((slots,), seeds)
        self.extras.start(starts)

    def cells(self, slots: Int64, positions: Int64, page_size: int) -> Int64:
        """Return where the KV of positions of slots lies: page * page_size + offset."""
        pages = self.table.host[slots, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size

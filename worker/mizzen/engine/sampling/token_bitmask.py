"""Bitmasks of allowed tokens by slot: rows on the host, and the same on the device.

A row stays where it is for as long as its request runs, so that only rows that change are written and sent.
On a GPU they are sent in a stream of their own, while the model runs in the stream of the steps.
"""

from __future__ import annotations

import torch

from mizzen.core.request import Int32

FIRST_ROWS = 8


class MaskTable:
    """Rows of int32 words: bit t % 32 of word t // 32 of a slot's row allows token t.

    Used from one thread.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.words = -(-vocab_size // 32)
        self._cuda = device.type == "cuda"
        self._device = device
        self._kept = self._host_rows(0)
        self.host: Int32 = self._kept.numpy()
        """int32 [rows, words]. Call `hold` before it is written to."""
        self.device = self._device_rows()
        """The same on the device, for the stream of the steps."""
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._sent, self._applied = torch.cuda.Event(), torch.cuda.Event()

    def reach(self, rows: int) -> None:
        """Have so many rows at least; what is there stays."""
        held = len(self._kept)
        if rows <= held:
            return
        self.hold()
        grown = self._host_rows(max(FIRST_ROWS, 2 * held, rows))
        grown[:held] = self._kept
        self._kept, self.host = grown, grown.numpy()
        self.device = self._device_rows()
        if self._cuda:
            # The memory may be in use yet by what the steps' stream has before it.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self.send(0, held)

    def hold(self) -> None:
        """Wait until what was sent has left the host's rows."""
        if self._cuda:
            self._sent.synchronize()

    def send(self, first: int, last: int) -> None:
        """Send rows first to last - 1; what is enqueued in the current stream from now on reads them."""
        if not self._cuda:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._applied)
            self.device[first:last].copy_(self._kept[first:last], non_blocking=True)
            self._sent.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._sent)

    def applied(self) -> None:
        """Note that all kernels that read the rows of a step are enqueued in the current stream."""
        if self._cuda:
            self._applied.record(torch.cuda.current_stream(self._device))

    def _host_rows(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self.words), -1, dtype=torch.int32, pin_memory=self._cuda)

    def _device_rows(self) -> torch.Tensor:
        return self._kept if not self._cuda else torch.empty_like(self._kept, device=self._device)

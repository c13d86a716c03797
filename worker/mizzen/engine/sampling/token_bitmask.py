"""Bitmasks of allowed tokens by slot, on the host and on the device.

A row keeps its place while its request runs, so only changed rows are written and sent. On a GPU they are
sent in a separate stream while the model runs in the steps' stream. `GrammarMasks` owns them.
"""

from __future__ import annotations

import torch

from mizzen.core.request import Int32

FIRST_ROWS = 8


class TokenBitmasks:
    """Rows of int32 words: bit t % 32 of word t // 32 of a slot's row allows token t.

    Used from one thread.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.words = -(-vocab_size // 32)
        self._cuda = device.type == "cuda"
        self._device = device
        self._host_tensor = self._host_rows(0)
        self.host: Int32 = self._host_tensor.numpy()
        """int32 [rows, words] on the host. Call `wait_until_sent` before writing to it."""
        self.device = self._device_rows()
        """The rows on the device, for the stream of the steps."""
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._sent, self._applied = torch.cuda.Event(), torch.cuda.Event()

    def ensure_rows(self, rows: int) -> None:
        """Grow to at least `rows` rows; existing rows keep their content."""
        old_rows = len(self._host_tensor)
        if rows <= old_rows:
            return
        self.wait_until_sent()
        grown = self._host_rows(max(FIRST_ROWS, 2 * old_rows, rows))
        grown[:old_rows] = self._host_tensor
        self._host_tensor, self.host = grown, grown.numpy()
        self.device = self._device_rows()
        if self._cuda:
            # Earlier work in the steps' stream may still use this memory.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self.send_rows(0, old_rows)

    def wait_until_sent(self) -> None:
        """Wait until the last copy has read the host's rows."""
        if self._cuda:
            self._sent.synchronize()

    def send_rows(self, first: int, last: int) -> None:
        """Send rows first to last - 1; work enqueued in the current stream from now on reads them."""
        if not self._cuda:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._applied)
            self.device[first:last].copy_(self._host_tensor[first:last], non_blocking=True)
            self._sent.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._sent)

    def mark_applied(self) -> None:
        """Record that all kernels that read a step's rows are enqueued in the current stream."""
        if self._cuda:
            self._applied.record(torch.cuda.current_stream(self._device))

    def _host_rows(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self.words), -1, dtype=torch.int32, pin_memory=self._cuda)

    def _device_rows(self) -> torch.Tensor:
        return (
            self._host_tensor if not self._cuda else torch.empty_like(self._host_tensor, device=self._device)
        )

# SPDX-License-Identifier: Apache-2.0
"""Bitmasks of allowed tokens by slot, on host and device.

Rows are indexed by slot, so only rows that changed are written and sent to the device. On a GPU they are sent
in a separate stream, while the model runs in the stream of the steps. `GrammarMasks` owns the bitmasks.
"""

from __future__ import annotations

import torch

from mizzen.core.request import Int32

FIRST_ROWS = 8
"""Minimum number of rows in the first allocation."""


class TokenBitmasks:
    """Bitmasks of allowed tokens, with a row of int32 words per slot; used from one thread.

    Bit t % 32 of word t // 32 is set if token t is allowed.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.words = -(-vocab_size // 32)
        self._cuda = device.type == "cuda"
        self._device = device
        self._host_tensor = self._host_rows(0)
        self.host: Int32 = self._host_tensor.numpy()
        """Rows on the host, int32 [rows, words]. Call `wait_until_sent` before writing to them."""
        self.device = self._device_rows()
        """Rows on the device, int32 [rows, words]; kernels in the stream of the steps read them."""
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
            # Earlier work in the stream of the steps may still use this memory.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self.send_rows(0, old_rows)

    def wait_until_sent(self) -> None:
        """Wait until the last copy to the device has read the rows on the host."""
        if self._cuda:
            self._sent.synchronize()

    def send_rows(self, first: int, last: int) -> None:
        """Send rows `first` to `last` - 1 to the device; later work in the current stream waits for them."""
        if not self._cuda:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._applied)
            self.device[first:last].copy_(self._host_tensor[first:last], non_blocking=True)
            self._sent.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._sent)

    def mark_applied(self) -> None:
        """Record that all kernels of a step that read the rows are enqueued in the current stream."""
        if self._cuda:
            self._applied.record(torch.cuda.current_stream(self._device))

    def _host_rows(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self.words), -1, dtype=torch.int32, pin_memory=self._cuda)

    def _device_rows(self) -> torch.Tensor:
        return (
            self._host_tensor if not self._cuda else torch.empty_like(self._host_tensor, device=self._device)
        )

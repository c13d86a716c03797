# SPDX-License-Identifier: Apache-2.0
"""`Staging`: a temporary buffer for tensors that are converted as soon as all of them are loaded.

Loading fills one such buffer after the other, so that few of them exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Staging:
    """Buffer for the tensors of one layer, which exists only from `open` to `close`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        convert: Callable[[torch.Tensor], None],
    ) -> None:
        """Describe a buffer.

        Args:
            shape: Shape of the buffer.
            dtype: Data type of its elements.
            device: Device on which it is allocated.
            convert: Receives the complete buffer; must keep no reference to it.
        """
        self.shape = torch.empty(shape, dtype=dtype, device="meta")
        """Tensor without storage; its views stand for those of the buffer."""
        self.device = device
        self._convert = convert
        self._buffer: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Size of the buffer in bytes."""
        return self.shape.numel() * self.shape.element_size()

    def open(self) -> None:
        """Allocate the buffer, unless it exists."""
        if self._buffer is None:
            self._buffer = torch.empty_like(self.shape, device=self.device)

    def place(self, view: torch.Tensor) -> torch.Tensor:
        """Return the view of the buffer that a view of `shape` stands for.

        Raises:
            RuntimeError: The buffer is not open.
        """
        if self._buffer is None:
            raise RuntimeError("the buffer is not open")
        return self._buffer.as_strided(view.shape, view.stride(), view.storage_offset())

    def close(self) -> None:
        """Convert the content of the buffer, and free the buffer.

        Raises:
            RuntimeError: The buffer is not open.
        """
        if self._buffer is None:
            raise RuntimeError("the buffer is not open")
        buffer, self._buffer = self._buffer, None
        self._convert(buffer)

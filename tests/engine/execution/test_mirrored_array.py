# SPDX-License-Identifier: Apache-2.0
"""Arrays on host and device are copied only if they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.engine.uploader import MirroredArray, Uploader


class CountingUploader(Uploader):
    """Counts copies to a device without memory."""

    copies = 0

    def __call__(self, array: NDArray[Any]) -> torch.Tensor:
        self.copies += 1
        return torch.from_numpy(array).to(self.device)


def test_only_changed_elements_are_copied() -> None:
    upload = CountingUploader(torch.device("meta"))
    mirrored = MirroredArray(np.ones(4, np.float32), upload)
    mirrored.write((np.array([1, 2]),), np.ones(2, np.float32))
    assert upload.copies == 0
    mirrored.write((np.array([1, 1, 2]),), np.array([1, 0.5, 1], np.float32))
    assert upload.copies == 2
    assert mirrored.host.tolist() == [1, 0.5, 1, 1]
    mirrored.write((np.array([1, 1]),), np.array([0.5, 1], np.float32))
    assert upload.copies == 4
    assert mirrored.host.tolist() == [1, 1, 1, 1]

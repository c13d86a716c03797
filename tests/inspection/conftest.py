# SPDX-License-Identifier: Apache-2.0
"""Makes the scripts importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # the scripts import each other, as programs do

# SPDX-License-Identifier: Apache-2.0
"""Makes this folder's helper modules (`ratchets`, `private_words`) and the scripts importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # the scripts import each other, as programs do

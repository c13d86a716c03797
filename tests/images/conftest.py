# SPDX-License-Identifier: Apache-2.0
"""Makes this folder's helper modules importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

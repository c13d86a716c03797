# SPDX-License-Identifier: Apache-2.0
# FlashInfer is not installed on machines without a GPU.
from typing import Any

def __getattr__(name: str) -> Any: ...

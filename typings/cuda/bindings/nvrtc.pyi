# SPDX-License-Identifier: Apache-2.0
# The bindings are compiled modules without type information.
from typing import Any

def __getattr__(name: str) -> Any: ...

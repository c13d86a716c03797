# SPDX-License-Identifier: Apache-2.0
"""Structured logs of gateways and engines: one JSON object per line. Prompts and keys are never logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, including the members of `extra={"fields": {...}}`."""

    def __init__(self, **fixed: Any) -> None:
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line of JSON."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self._fixed,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up_logging(**fixed: Any) -> None:
    """Make the root logger write JSON lines to standard error, each with the members `fixed`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(**fixed))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)

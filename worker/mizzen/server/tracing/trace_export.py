# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of tracing: reads the records of finished requests, and exports their spans.

Spans are created and exported in the supervisor's process, because the work would otherwise compete with rank
0's serving loop for the interpreter. This module imports OpenTelemetry only if tracing is on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from socket import gethostname

import msgspec

from mizzen.common.otlp import HeadersFile, TracingUnavailable, traces_endpoint
from mizzen.server.config import EngineConfig
from mizzen.server.tracing.request_trace import read_trace

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
"""Capacity of the pipe, which holds the records of several thousand requests."""
LAST_RECORDS_SECONDS = 1.0
"""Maximum time for reading the last records once the ranks have exited."""


def check_tracing(config: EngineConfig) -> None:
    """Check that tracing, if the option --otlp-endpoint configures it, is possible.

    An endpoint in the environment never keeps an engine from starting: `start_trace_export` logs the reason.

    Raises:
        TracingUnavailable: OpenTelemetry is not installed.
    """
    if config.otlp_endpoint and not config.node_rank:
        try:
            import mizzen.server.tracing.engine_spans  # noqa: F401
        except ImportError as error:
            raise TracingUnavailable(traces_endpoint(config.otlp_endpoint), error.name) from error


def start_trace_export(config: EngineConfig) -> TraceExport | None:
    """Return the export of an engine's spans.

    The result is None if tracing is off or impossible, or if another node runs rank 0.
    """
    url = traces_endpoint(config.otlp_endpoint)
    if not url or config.node_rank:
        return None
    try:
        return TraceExport(config, url)
    except ImportError as error:
        log.warning("no traces: %s", TracingUnavailable(url, error.name))
        return None


class TraceExport:
    """A pipe for the records of finished requests, and a thread that exports their spans."""

    def __init__(self, config: EngineConfig, url: str) -> None:
        from mizzen.server.tracing.engine_spans import EngineSpans

        self._dropped = 0
        self._lock = threading.Lock()
        self._spans = EngineSpans(
            url,
            HeadersFile(config.otlp_headers_file),
            model=config.served_name or Path(config.model).resolve().name,
            engine=config.engine_id or f"{gethostname()}-{os.getpid()}",
            revision=config.revision,
            on_drop=self._drop,
        )
        read_end, self._write_end = os.pipe()
        try:
            fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError as error:  # beyond the user's limit: the default capacity is smaller, but works
            log.debug("cannot enlarge the pipe for traces", extra={"fields": {"reason": error.strerror}})
        self._thread = threading.Thread(target=self._run, args=(read_end,), name="traces", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        """Write end of the pipe, for rank 0's process to inherit."""
        return self._write_end

    @property
    def dropped(self) -> int:
        """Number of spans that could not be exported."""
        return self._dropped

    def release_descriptor(self) -> None:
        """Close this process's copy of the write end; call this once rank 0's process has inherited it."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self) -> None:
        """Export the spans of all written records, for a few seconds at most; rank 0 must have exited."""
        self.release_descriptor()
        self._thread.join(LAST_RECORDS_SECONDS)
        self._spans.close()

    def _drop(self, spans: int) -> None:
        with self._lock:
            self._dropped += spans

    def _run(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb") as stream:
            while True:
                try:
                    trace = read_trace(stream)
                    if trace is None:
                        return
                    # Computed for each record, so that spans follow corrections of the system's clock.
                    self._spans.create(trace, time.time() - time.monotonic())
                except (msgspec.MsgspecError, ValueError):
                    log.exception("cannot trace a request")

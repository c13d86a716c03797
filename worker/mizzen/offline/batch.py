# SPDX-License-Identifier: Apache-2.0
"""Runs a batch of requests to completion on an engine in this process.

`LLM` uses it; the engine must not have other requests meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from mizzen.core.images.types import MissingImages
from mizzen.core.outputs import RequestSideOutputs
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.engine.engine import Engine
from mizzen.engine.images.pending import ImageFile
from mizzen.engine.overlap_loop import StepFailed
from mizzen.gateway.text.stream import TextStream
from mizzen.wire.client.stream import TokenLogprobs, logprob_entries

ProgressCallback = Callable[[int, int], None]
"""Function called after each step with two numbers: the requests that finished, and the tokens generated."""

STEPS_AHEAD = 4
"""Number of largest steps whose prompts are prepared ahead for embeddings, those in flight included."""


@dataclass(slots=True)
class BatchEntry:
    """A request of the batch and its output so far."""

    request: Request
    stream: TextStream | None
    """Detokenizer that finds stop strings; None if the request has no stop strings."""
    image_files: Mapping[bytes, ImageFile] = field(default_factory=dict)
    """Files of the prompt's images by digest."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: NDArray[np.float32] | None = None


class Batch:
    """Requests that run together on one engine."""

    def __init__(
        self, engine: Engine, entries: Iterable[BatchEntry], max_live: int, max_live_tokens: float = math.inf
    ) -> None:
        """Prepare a batch for `run`.

        Args:
            engine: Engine without other requests.
            entries: One entry per request; `run` fills in the outputs. An iterator may prepare entries while
                the device computes earlier ones.
            max_live: Maximum number of unfinished requests in the engine; the others are submitted later.
            max_live_tokens: Number of prompt tokens of unfinished requests from which on no further request
                is submitted.
        """
        self._engine = engine
        self._waiting = iter(entries)
        self._max_live = max_live
        self._max_live_tokens = max_live_tokens
        self._live: dict[int, BatchEntry] = {}
        self._live_tokens = 0
        self.entries: list[BatchEntry] = []
        """Entries that were submitted, in order; all of them once `run` has returned."""

    def run(self, advance: ProgressCallback) -> None:
        """Run all requests to completion, and call `advance` after each step.

        Raises:
            ValueError: a request was rejected, or its entry cannot be prepared; the engine is ready for the
                next batch.
            RuntimeError: a request failed; the engine is ready for the next batch.
            StepFailed: the device failed; the engine cannot be used any more.
        """
        try:
            while self._submit() or self._live:
                advance(*self._step())
        except StepFailed:
            raise
        except BaseException:
            self._abort_rest()
            raise

    def _submit(self) -> bool:
        """Submit as many requests as the limits allow; return whether there was one."""
        before = len(self.entries)
        while len(self._live) < self._max_live and self._live_tokens < self._max_live_tokens:
            entry = next(self._waiting, None)
            if entry is None:
                break
            self.entries.append(entry)
            self._live[entry.request.rid] = entry
            self._live_tokens += len(entry.request.prompt)
            self._engine.submit(entry.request)
        return len(self.entries) > before

    def _step(self) -> tuple[int, int]:
        """Run a step; return how many requests it finished, and how many tokens it generated."""
        output = self._engine.step(time.monotonic())
        for missing in self._engine.drain_missing_images():
            self._provide_images(missing)
        finished: list[Finished] = []
        tokens = 0
        if output is not None:
            finished += output.finished
            tokens = len(output.tokens)
            _collect_side_outputs(output.side_outputs, self._live)
            for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                if (entry := self._live.get(rid)) is not None:
                    self._append_token(entry, token)
        finished += self._engine.drain_finished()
        self._engine.drain_cache_events()  # not used here, but they must not accumulate
        for end in finished:
            entry = self._live.pop(end.rid, None)
            if entry is None:
                continue
            self._live_tokens -= len(entry.request.prompt)
            if end.refused:
                raise ValueError(end.message)
            if end.reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {end.message}")
            entry.finished = end
        return len(finished), tokens

    def _provide_images(self, missing: MissingImages) -> None:
        """Give the engine the files of the images that it needs for a request."""
        entry = self._live.get(missing.rid)
        if entry is None:
            return
        for digest in missing.digests:
            self._engine.provide_image(structs.replace(entry.image_files[digest], rid=missing.rid))

    def _append_token(self, entry: BatchEntry, token: int) -> None:
        """Append a token to a request's output; abort the request if its text now contains a stop string."""
        if entry.stopped:
            return
        entry.tokens.append(token)
        if entry.stream is not None:
            entry.text += entry.stream.add((token,))[0]
            if entry.stream.stopped:
                entry.stopped = True
                self._engine.abort(entry.request.rid)

    def _abort_rest(self) -> None:
        """Abort the remaining requests of a failed batch, so that the engine is ready for the next."""
        for rid in self._live:
            self._engine.abort(rid)
        while self._engine.busy:
            self._engine.step(time.monotonic())
        self._engine.drain_finished()


def _collect_side_outputs(reports: RequestSideOutputs, live: Mapping[int, BatchEntry]) -> None:
    """Add a step's log probabilities and embeddings to the entries of their requests."""
    for part in reports.logprobs:
        if (entry := live.get(part.rid)) is None:
            continue
        if part.prompt:
            entry.prompt_logprobs += logprob_entries(part.ids, part.values, 0)
        else:
            named = len(entry.request.sampling.logprob_token_ids)
            entry.logprobs += logprob_entries(part.ids, part.values, named)
    for vector in reports.vectors:
        if (entry := live.get(vector.rid)) is not None:
            entry.vector = vector.vector

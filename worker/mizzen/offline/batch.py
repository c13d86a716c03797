"""A batch of requests that is run to its end in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mizzen.core.outputs import RequestSideOutputs
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.engine.engine import Engine
from mizzen.engine.overlap_loop import StepFailed
from mizzen.gateway.text.stream import TextStream
from mizzen.wire.client.stream import TokenLogprobs, logprob_entries

Advance = Callable[[int, int], None]
"""(requests that ended, tokens that came)."""


@dataclass(slots=True)
class Answer:
    """A request that is being answered."""

    request: Request
    stream: TextStream | None
    """Present where stop strings have to be found while tokens come."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: NDArray[np.float32] | None = None


class Batch:
    """Requests that run together."""

    def __init__(self, engine: Engine, answers: Sequence[Answer], room: int) -> None:
        """Prepare; `run` runs them.

        Args:
            engine: has nothing else to do meanwhile.
            answers: one for each request; they are filled in.
            room: requests that the engine takes at once.
        """
        self._engine = engine
        self._answers = answers
        self._room = room
        self._live: dict[int, Answer] = {}

    def run(self, advance: Advance) -> None:
        """Run the requests to their ends, feeding the engine as its queue has room.

        Args:
            advance: told after each step what it brought.

        Raises:
            ValueError: a request was refused.
            RuntimeError: a request failed. The engine is free for the next batch in either case.
            StepFailed: the device failed; the engine cannot go on.
        """
        waiting = iter(self._answers)
        done = 0
        try:
            while done < len(self._answers):
                while len(self._live) < self._room:
                    answer = next(waiting, None)
                    if answer is None:
                        break
                    self._live[answer.request.rid] = answer
                    self._engine.submit(answer.request)
                ended, tokens = self._step()
                done += ended
                advance(ended, tokens)
        except StepFailed:
            raise
        except BaseException:
            self._abandon()
            raise

    def _step(self) -> tuple[int, int]:
        """Run a step; return how many requests ended and how many tokens came."""
        output = self._engine.step(time.monotonic())
        finished: list[Finished] = []
        tokens = 0
        if output is not None:
            finished += output.finished
            tokens = len(output.tokens)
            _take_reports(output.side_outputs, self._live)
            for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                if (answer := self._live.get(rid)) is not None:
                    self._take(answer, token)
        finished += self._engine.drain_finished()
        self._engine.drain_cache_events()  # nobody here routes by them; they must not pile up
        for end in finished:
            answer = self._live.pop(end.rid, None)
            if answer is None:
                continue
            if end.refused:
                raise ValueError(end.message)
            if end.reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {end.message}")
            answer.finished = end
        return len(finished), tokens

    def _take(self, answer: Answer, token: int) -> None:
        """Take a request's next token; end the request when its text completes a stop string."""
        if answer.stopped:
            return
        answer.tokens.append(token)
        if answer.stream is not None:
            answer.text += answer.stream.add((token,))[0]
            if answer.stream.stopped:
                answer.stopped = True
                self._engine.abort(answer.request.rid)

    def _abandon(self) -> None:
        """End what is left of a batch that cannot go on, so that the engine is free for the next."""
        for rid in self._live:
            self._engine.abort(rid)
        while self._engine.busy:
            self._engine.step(time.monotonic())
        self._engine.drain_finished()


def _take_reports(reports: RequestSideOutputs, live: Mapping[int, Answer]) -> None:
    """Take what a step gives requests beside their tokens."""
    for part in reports.logprobs:
        if (answer := live.get(part.rid)) is None:
            continue
        if part.prompt:
            answer.prompt_logprobs += logprob_entries(part.ids, part.values, 0)
        else:
            named = len(answer.request.sampling.logprob_token_ids)
            answer.logprobs += logprob_entries(part.ids, part.values, named)
    for vector in reports.vectors:
        if (answer := live.get(vector.rid)) is not None:
            answer.vector = vector.vector

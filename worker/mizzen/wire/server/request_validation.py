# SPDX-License-Identifier: Apache-2.0
"""Validates `Generate` and `Embed` messages and converts them to scheduler requests."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np

from mizzen.common.model_task import Task
from mizzen.common.request_timeline import RequestTimeline, start_timeline
from mizzen.core.request import Int32, Pooling, Request
from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams, sent_values
from mizzen.core.validation import generated_fault, logprobs_fault
from mizzen.wire.messages import Embed, Generate, Sampling
from mizzen.wire.server.image_validation import ImageModel, PlacedImages, read_images
from mizzen.wire.server.invalid_request import InvalidImages, InvalidRequest

MAX_SALT_BYTES = 256
MAX_STOP_TOKENS = 1024
MAX_QUEUE_SECONDS = 86_400.0
EMBEDDING = SamplingParams(temperature=0.0, max_tokens=1)

EMBEDS_ONLY = "the model has no language-model head and only embeds texts: request embeddings"
CLASSIFIES_ONLY = "the model has no language-model head: request labels or embeddings"
CANNOT_GENERATE = {Task.EMBED: EMBEDS_ONLY, Task.CLASSIFY: CLASSIFIES_ONLY}
"""Errors for requests to generate, by the task of the model."""
NO_LABELS = "classify must be false: the model has no classification head"


@dataclass(frozen=True, slots=True)
class MessageValidator:
    """Validates requests for one model, and converts them to scheduler requests."""

    vocab_size: int
    context_length: int
    task: Task = Task.GENERATE
    traces: bool = False
    """Whether requests get a timeline if the gateway sent the context of a sampled trace."""
    images: ImageModel | None = None
    """Rules for images; None if the engine does not accept images."""

    def to_request(self, message: Generate | Embed, now: float) -> Request:
        """Return the scheduler request for a message that arrived at `now`; the request's `rid` is still the
        gateway's handle.

        Raises:
            InvalidRequest: a field is invalid; the text names the field, its value and the rule.
        """
        self._common(message)
        return self._generate(message, now) if isinstance(message, Generate) else self._embed(message, now)

    def _generate(self, message: Generate, now: float) -> Request:
        if self.task is not Task.GENERATE:
            raise InvalidRequest(CANNOT_GENERATE[self.task])
        sampling, prompt = self._sampling(message.sampling), self._prompt(message.prompt)
        images = self._images(message, prompt)
        request = Request(
            rid=message.rid,
            prompt=prompt,
            sampling=sampling,
            seed=effective_seed(sampling.seed),
            salt=message.salt,
            priority=message.priority,
            generated=message.generated,
            images=images.images,
            rotary=images.rotary,
            rotary_offset=images.rotary_offset,
            tenant=message.tenant,
            arrival=now,
            timeline=self._timeline(message.traceparent, now),
        )
        if fault := generated_fault(request) or logprobs_fault(request):
            raise InvalidRequest(fault)
        return request

    def _embed(self, message: Embed, now: float) -> Request:
        if message.pooling not in list(Pooling):
            raise InvalidRequest(f"pooling must be one of {', '.join(Pooling)}, not {message.pooling[:32]!r}")
        if message.classify and self.task is not Task.CLASSIFY:
            raise InvalidRequest(NO_LABELS)
        prompt = self._prompt(message.prompt)
        if not 0 <= message.second_start < len(prompt):
            raise InvalidRequest(
                f"second_start must be between 0 and {len(prompt) - 1}, not {message.second_start}"
            )
        return Request(
            rid=message.rid,
            prompt=prompt,
            sampling=EMBEDDING,
            salt=message.salt,
            priority=message.priority,
            pooling=Pooling.LAST if message.classify else Pooling(message.pooling),  # of the head
            normalize=message.normalize,
            classify=message.classify,
            second_start=message.second_start,
            arrival=now,
            timeline=self._timeline(message.traceparent, now),
        )

    def _timeline(self, traceparent: str, now: float) -> RequestTimeline | None:
        return start_timeline(traceparent, now) if self.traces and traceparent else None

    def _common(self, message: Generate | Embed) -> None:
        if not 0 <= message.rid < 2**32:
            raise InvalidRequest(f"rid must be between 0 and {2**32 - 1}, not {message.rid}")
        if len(message.salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"salt has {len(message.salt)} bytes; at most {MAX_SALT_BYTES} are allowed")
        if not -(2**31) <= message.priority < 2**31:
            raise InvalidRequest(f"priority must be a 32-bit integer, not {message.priority}")
        seconds = message.queue_seconds
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_QUEUE_SECONDS):
            raise InvalidRequest(f"queue_seconds must be between 0 and {MAX_QUEUE_SECONDS:g}, not {seconds}")

    def _prompt(self, packed: bytes) -> Int32:
        if len(packed) % 4:
            raise InvalidRequest(f"prompt has {len(packed)} bytes, not a multiple of 4 (int32 token ids)")
        prompt = np.frombuffer(packed, dtype="<i4")
        if not len(prompt):
            raise InvalidRequest("prompt is empty; at least one token is needed")
        if len(prompt) >= self.context_length:
            raise InvalidRequest(
                f"prompt has {len(prompt)} tokens, the context length is {self.context_length}: "
                "the prompt must be shorter than the context"
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"prompt contains the token id {wrong}; ids go from 0 to {self.vocab_size - 1}"
            )
        return prompt

    def _images(self, message: Generate, prompt: Int32) -> PlacedImages:
        if not message.images:
            return PlacedImages()
        if self.images is None:
            raise InvalidImages("images must be empty: this engine does not accept images")
        return read_images(message.images, prompt, self.images)

    def _sampling(self, sampling: Sampling) -> SamplingParams:
        stops = sampling.stop_token_ids
        if len(stops) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids has {len(stops)} entries; at most {MAX_STOP_TOKENS} are allowed"
            )
        values, most = sent_values(sampling), sampling.max_tokens
        values |= {
            "top_k": min(sampling.top_k, self.vocab_size),
            "max_tokens": None if most is None else min(most, self.context_length),
            "min_tokens": min(sampling.min_tokens, self.context_length),
            "grammar": _grammar(sampling.grammar),
        }
        try:
            params = SamplingParams(**values)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if fault := params.token_fault(self.vocab_size):
            raise InvalidRequest(fault)
        return params


def _grammar(grammar: tuple[str, str] | None) -> Grammar | None:
    if grammar is None:
        return None
    kind, text = grammar
    if kind not in list(GrammarKind):
        raise InvalidRequest(f"grammar must be one of {', '.join(GrammarKind)}, not {kind[:32]!r}")
    return Grammar(GrammarKind(kind), text)


def effective_seed(seed: int | None) -> int:
    """Return `seed` modulo 2**64; None means a random 64-bit seed."""
    return secrets.randbits(64) if seed is None else seed % 2**64

# SPDX-License-Identifier: Apache-2.0
"""A request for generation, independent of the endpoint that received it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.images.request_images import RequestImages
from mizzen.gateway.requests.images import PromptImageBytes
from mizzen.gateway.requests.output import OutputForm
from mizzen.gateway.requests.prompt_scores.shared_prefixes import find_shared_prefixes
from mizzen.gateway.text.model import TextModel

MAX_SEQUENCES = 1024
"""Maximum number of sequences of one request: prompts times `best_of`."""
SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of successive sequences: 2**64 over the golden ratio.

It is odd, so that all sequences of a prompt get different seeds.
"""

Prompt: TypeAlias = "str | array[int]"
"""Text, or token ids as an int32 array, which takes little memory while the request waits."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt."""

    ids: Int32
    """Token ids, int32 [n]."""
    second_start: int = 0
    """Index of the first token of a pair's second text, if the tokenizer gives it another type; else 0."""
    images: tuple[PromptImageBytes, ...] = ()
    """Images of the prompt, in order of their positions; `ids` has a placeholder for each of their
    embeddings."""


class PromptSource(Protocol):
    """Makes the token ids of a prompt, for prompts that are not simply a text or a conversation."""

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        """Return the prompt's tokens for a text model; `context` is the context length, or 0.

        Raises:
            ApiError: 400 if the prompt cannot be made.
            TooManyTokens: the text is so long that it must have more than `context` tokens.
        """
        ...

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        """Return the ids of the tokens whose log probabilities the request needs; may be empty.

        Raises:
            ApiError: 400 if the tokenizer has no such token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Parameters of a request; `split_sequences` splits it into one request per sequence."""

    model: str
    sampling: SamplingParams
    max_tokens_given: bool = False
    """True if the client set `sampling.max_tokens`; prompt and output must then fit into the context."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """True if each stream event reports the usage so far."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """True if log probabilities name tokens by their ids."""
    skip_special_tokens: bool = True

    messages: tuple[dict[str, Any], ...] | None = None
    """Conversation in the form that chat templates expect; None if the request has a `prompt`."""
    images: RequestImages | None = None
    """Images of the conversation, in the order of the parts `{"type": "image"}`; None if it has none."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (`chat_template_kwargs`)."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    output_form: OutputForm | None = None
    """Treatment of tool calls and reasoning; with None, all text is content."""

    grammar_field: str = "tools"
    """Field of the body that constrains the answer; errors name it."""
    prompt_field: str = "prompt"
    """Field of the body that holds the prompt; errors name it."""

    prompt: Prompt | None = None
    """Text or token ids; the first of `prompts`."""
    prompts: tuple[Prompt, ...] = ()
    """All prompts of a completion."""
    prompt_source: PromptSource | None = None
    """Object that makes the token ids; if set, `prompt` only serves for estimates and logs."""
    truncate: int | None = None
    """Number of tokens to which a conversation is cut at its end; -1 for the context length, None for no
    cut."""
    add_special_tokens: bool = True
    """True if the tokenizer adds its own special tokens, such as a BOS, to a text prompt."""
    echo: bool = False
    """True if the answer begins with its prompt."""
    prompt_only: bool = False
    """True if no output tokens are returned. (The engine still samples one, which is dropped.)"""

    logprobs_source: int | None = None
    """Index of a sequence of the same request from which this sequence takes the log probabilities of the
    prompt tokens before `sampling.prompt_logprobs_from`, because their prompts begin alike; None for none."""

    session: str = ""
    """The body's `prompt_cache_key` or `user`, which related requests share; if it is long, its digest."""
    priority: int | None = None
    """Requested priority; None selects the priority of the API key."""
    timeout_seconds: float | None = None
    """Maximum time from the request's arrival to the last byte of its response."""

    ignored_fields: tuple[str, ...] = ()
    """Paths of the body's fields that are ignored."""

    n: int = 1
    """Number of choices per prompt."""
    best_of: int = 1
    """Number of sequences per prompt, at least `n`; the `n` most probable ones become choices."""

    @property
    def logprobs(self) -> bool:
        """True if log probabilities are requested."""
        return self.sampling.logprobs is not None

    @property
    def returns_scores(self) -> bool:
        """True if a response that is sent as a whole has log probabilities of each prompt's tokens once."""
        return self.echo and self.logprobs and self.best_of == 1 and not self.stream

    @property
    def returns_all_scores(self) -> bool:
        """True if `returns_scores`, and they are those of all prompt tokens."""
        whole = self.sampling.prompt_logprobs_from == 0 and not self.sampling.logprob_token_ids
        return self.returns_scores and whole

    def start_scores_at(self, token: int, source: int | None = None) -> GenerationRequest:
        """Return the request with log probabilities of the prompt's tokens from an index on.

        `source` is the `logprobs_source` of the tokens before it.
        """
        sampling = replace(self.sampling, prompt_logprobs_from=token)
        return replace(self, logprobs_source=source, sampling=sampling)

    def split_sequences(self) -> list[GenerationRequest]:
        """Return one request per sequence, grouped by prompt.

        The first sequence of each prompt has the request's seed, so that it gives the same answer as a
        request for a single sequence. The prompt's other sequences have different seeds.
        """
        if self.best_of == 1 and len(self.prompts) <= 1:
            return [self]
        sampling = self.sampling
        if self.best_of > self.n and sampling.logprobs is None:  # log probabilities rank the sequences
            sampling = replace(sampling, logprobs=0)
        requests: list[GenerationRequest] = []
        for prompt in self.prompts or (self.prompt,):
            requests += [
                replace(self, prompt=prompt, prompts=(), sampling=sampling_of_sequence(sampling, index))
                for index in range(self.best_of)
            ]
        if self.returns_scores:
            return share_prompt_logprobs(requests)
        return requests


def share_prompt_logprobs(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """Return the requests of several prompts, so that common prefixes of the prompts are scored only once."""
    prompts = [request.prompt for request in requests if request.prompt is not None]
    shared = find_shared_prefixes(prompts)
    return [
        request.start_scores_at(prefix.tokens, prefix.source)
        if (prefix := shared.get(index)) and prefix.tokens > request.sampling.prompt_logprobs_from
        else request
        for index, request in enumerate(requests)
    ]


def sampling_of_sequence(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling parameters of one of a prompt's sequences; `index` is its position, from 0.

    The seed is derived from the request's seed, if the request has one. Only the first sequence returns the
    prompt's log probabilities, because a request that returns them cannot use the whole prefix cache.
    """
    if index == 0:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + index * SEED_STEP) % 2**64
    return replace(sampling, seed=seed, prompt_logprobs=None)

"""`LLM`: offline inference on batches of prompts in this process, without a server."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mizzen.common.packaged_files import find_demo_model
from mizzen.core.request import FinishReason, Int32, Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.gateway.text.pooling import model_pooling
from mizzen.gateway.text.stream import TextStream
from mizzen.gateway.text.template import ChatTemplate
from mizzen.gateway.text.tokenizer import Tokenizer, read_files
from mizzen.offline.batch import Batch, BatchEntry
from mizzen.progress import ProgressBar
from mizzen.wire.client.stream import TokenLogprobs
from mizzen.wire.server.request_validation import EMBEDS_ONLY

if TYPE_CHECKING:
    from mizzen.server.ranks.in_process import LocalRanks

Prompts = Sequence[str] | Sequence[Sequence[int]]
LARGE_GPU_PREFILL_TOKENS = 16384
"""Default `prefill_chunk_tokens` on large GPUs. Large steps increase throughput; the longer time between
tokens does not matter, because no client waits for single tokens."""
LARGE_GPU_BYTES = 64 << 30
"""Minimum memory in bytes of a large GPU. A step of `LARGE_GPU_PREFILL_TOKENS` needs only a small part of
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output for one prompt."""

    text: str
    """Output text without the stop token or stop string; empty if the tokenizer is skipped."""
    token_ids: list[int]
    """All output tokens, including the one that ended the output."""
    finish_reason: str
    """Reason why the output ended: "stop" (an end token, stop token or stop string) or "length"."""
    cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    """Log probabilities for each of `token_ids`; None unless `SamplingParams.logprobs` is set."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities for each prompt token from the second on; None unless
    `SamplingParams.prompt_logprobs` is set."""


class LLM:
    """A model that runs in this process.

    >>> with LLM("demo", device="cpu") as llm:
    ...     print(llm.generate(["Hello"], SamplingParams(temperature=0))[0].text)

    Not thread-safe.
    """

    def __init__(self, model: str | Path, *, skip_tokenizer: bool = False, **options: Any) -> None:
        """Load a model.

        Args:
            model: Folder with config.json, the tokenizer and safetensors; "demo" for the packaged demo model.
            skip_tokenizer: Whether to use only token ids; `Completion.text` then stays empty.
            options: Fields of `mizzen.engine.config.EngineOptions`, for example `device`, `dtype`, `tensor`,
                `prefill_chunk_tokens` or `kv_cache_tokens`. `device` defaults to cuda if there is a GPU, else
                to cpu. Because no client waits for single tokens, `max_step_milliseconds` is unbounded by
                default, and `prefill_chunk_tokens` is 16,384 on a GPU with at least 64 GiB.

        Raises:
            TypeError: an option is unknown.
            ValueError: an option, the model or its tokenizer cannot be used; the message says which and why.
        """
        from mizzen.engine.loading.loader import load_engine

        option_names = {option.name for option in fields(EngineOptions)} - {"model"}
        if unknown_names := set(options) - option_names:
            raise TypeError(
                f"unknown options: {', '.join(sorted(unknown_names))}; LLM takes skip_tokenizer and "
                f"{', '.join(sorted(option_names))}"
            )
        options.setdefault("device", "cuda" if has_gpu() else "cpu")
        options.setdefault("max_step_milliseconds", math.inf)
        if options["device"] == "cuda" and gpu_bytes() >= LARGE_GPU_BYTES:
            options.setdefault("prefill_chunk_tokens", LARGE_GPU_PREFILL_TOKENS)
        model = find_demo_model(str(model)) or model
        self.options = EngineOptions(model=str(model), **options)
        self.tokenizer = None if skip_tokenizer else Tokenizer.load(model)
        self._ranks = start_ranks(self.options)
        try:
            self.engine: Engine = load_engine(
                self.options, followers=self._ranks and self._ranks.connect_followers()
            )
        except BaseException:
            if self._ranks:
                self._ranks.close()
            raise
        self._rid = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; the object cannot be used afterwards."""
        self.engine.close()
        if self._ranks:
            self._ranks.close()

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Generate a completion for each prompt.

        Args:
            prompts: Any number of prompts, as texts or as lists of token ids.
            params: Sampling parameters for all prompts, or one per prompt; by default `SamplingParams()`.
            progress: Whether to show a progress bar; by default only if standard error is a terminal.

        Returns:
            One completion for each prompt, in the same order.

        Raises:
            ValueError: a prompt or its parameters are invalid, the model cannot generate, or a grammar was
                rejected. Only in the last case may some prompts have run.
            RuntimeError: a request failed.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list: [prompt] for a single one")
        if not self.engine.info.generates:
            raise ValueError(EMBEDS_ONLY)
        params_per_prompt = self._params_per_prompt(params, len(prompts))
        entries = [self._build_entry(i, prompt, params_per_prompt[i]) for i, prompt in enumerate(prompts)]
        if not entries:
            return []
        self._run_batch(entries, progress)
        return [self._build_completion(entry) for entry in entries]

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Return one embedding for each prompt, float32 [prompts, hidden size].

        If `prompts` is empty, the shape of the result is [0, 0].

        Args:
            prompts: Any number of prompts, as texts or as lists of token ids.
            pooling: "last" for the last token's hidden state (after the final norm), "mean" for the mean over
                all tokens; None for the model's own pooling (`1_Pooling/config.json`, else "last").
            normalize: Whether to scale vectors to length 1.
            progress: Whether to show a progress bar; by default only if standard error is a terminal.

        Raises:
            ValueError: a prompt is invalid, or the pooling is unknown; nothing has run.
            RuntimeError: a request failed.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list: [prompt] for a single one")
        if pooling is None:
            pooling = model_pooling(read_files(Path(self.options.model)))
        if pooling not in list(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(Pooling)}, not {pooling!r}")
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        entries = [
            BatchEntry(
                self._build_request(self._token_ids(i, prompt), sampling, Pooling(pooling), normalize), None
            )
            for i, prompt in enumerate(prompts)
        ]
        self._run_batch(entries, progress)
        vectors = [entry.vector for entry in entries if entry.vector is not None]
        return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Generate an answer to each conversation, rendered with the model's chat template.

        Args:
            conversations: One conversation or a list of conversations; a conversation is a list of messages
                such as {"role": "user", "content": "Hi"}.
            params: Sampling parameters, as in `generate`.
            progress: Whether to show a progress bar, as in `generate`.

        Raises:
            ValueError: the model has no chat template, the template rejects the messages, or `generate`
                rejects a prompt or its parameters.
            RuntimeError: a request failed.
        """
        template = ChatTemplate.load(self.options.model)
        if template is None or self.tokenizer is None:
            raise ValueError(f"{self.options.model} has no chat template (or its tokenizer is skipped)")
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        chats: Any = [conversations] if single else conversations
        # A rendered template contains its special tokens.
        prompts = [
            self.tokenizer.encode(template.render(messages), add_special_tokens=False) for messages in chats
        ]
        return self.generate(prompts, params, progress=progress)

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise ValueError(f"params must be one or one per prompt, not {len(params)} for {count} prompts")
        return list(params)

    def _token_ids(self, index: int, prompt: str | Sequence[int]) -> Int32:
        """Tokenize a prompt if it is text, check its length and ids, and return the token ids.

        Raises:
            ValueError: the prompt is invalid; the message contains its `index`.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {index} is text, but the tokenizer is skipped: give token ids")
            prompt = self.tokenizer.encode(prompt)
        info = self.engine.info
        ids = np.asarray(prompt, dtype=np.int64)
        if ids.ndim != 1 or not 0 < len(ids) < info.context_length:
            raise ValueError(
                f"prompt {index} has {ids.size} tokens; it must have 1 to {info.context_length - 1} "
                f"(context length {info.context_length}, an output token included)"
            )
        if ids.min() < 0 or ids.max() >= info.vocab_size:
            raise ValueError(f"prompt {index} holds ids outside the vocabulary (0 to {info.vocab_size - 1})")
        return ids.astype(np.int32)

    def _build_entry(self, index: int, prompt: str | Sequence[int], params: SamplingParams) -> BatchEntry:
        """Validate a prompt and its parameters, and build a batch entry with its request.

        Raises:
            ValueError: the prompt or the parameters are invalid.
        """
        ids = self._token_ids(index, prompt)
        if fault := params.token_fault(self.engine.info.vocab_size):
            raise ValueError(fault)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need the tokenizer: use stop_token_ids, or do not skip it")
        stream = TextStream(self.tokenizer, params.stop) if params.stop and self.tokenizer else None
        return BatchEntry(self._build_request(ids, params), stream)

    def _build_request(
        self, ids: Int32, params: SamplingParams, pooling: Pooling | None = None, normalize: bool = True
    ) -> Request:
        self._rid += 1
        return Request(
            rid=self._rid,
            prompt=ids,
            sampling=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed % 2**64,
            pooling=pooling,
            normalize=normalize,
            arrival=time.monotonic(),
        )

    def _run_batch(self, entries: list[BatchEntry], progress: bool | None) -> None:
        """Run a batch to completion.

        `progress` sets whether to show a progress bar. If it is None, a bar is shown only if standard error
        is a terminal.
        """
        batch = Batch(self.engine, entries, self.options.max_waiting_requests)
        if sys.stderr.isatty() if progress is None else progress:
            with ProgressBar(len(entries)) as bar:
                batch.run(bar.advance)
        else:
            batch.run(lambda finished, tokens: None)

    def _build_completion(self, entry: BatchEntry) -> Completion:
        end = entry.finished
        assert end is not None
        reason = "stop" if entry.stopped or end.reason is FinishReason.STOP else "length"
        text = entry.text
        if entry.stream is not None:
            text += entry.stream.flush()
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(entry.tokens[:-1] if end.stop_token is not None else entry.tokens)
        sampling, count = entry.request.sampling, len(entry.tokens)
        return Completion(
            text=text,
            token_ids=entry.tokens,
            finish_reason=reason,
            cached_tokens=end.cached_tokens,
            # Tokens after a stop string are dropped, and so are their log probabilities.
            logprobs=None if sampling.logprobs is None else entry.logprobs[:count],
            prompt_logprobs=None if sampling.prompt_logprobs is None else entry.prompt_logprobs,
        )


def start_ranks(options: EngineOptions) -> LocalRanks | None:
    """Start the other ranks of a model as processes; return None if the model has only one rank."""
    if options.tensor == 1:
        return None
    from mizzen.server.ranks.in_process import LocalRanks

    return LocalRanks(options)


def has_gpu() -> bool:
    """Return whether PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_bytes() -> int:
    """Return the memory of the first GPU in bytes; 0 if PyTorch finds no GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if has_gpu() else 0

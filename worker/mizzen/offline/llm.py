# SPDX-License-Identifier: Apache-2.0
"""`LLM`: offline inference on batches of prompts in this process, without a server."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mizzen.common.model_task import ScoreActivation, Task, apply_activation
from mizzen.common.packaged_files import find_demo_model
from mizzen.core.request import Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.offline.batch import STEPS_AHEAD, Batch, BatchEntry
from mizzen.offline.completion import Completion, build_completion
from mizzen.offline.conversations import ConversationEncoder
from mizzen.offline.devices import gpu_bytes, has_gpu, start_ranks
from mizzen.offline.keywords import suggest_keywords
from mizzen.offline.requests import GenerationPrompts, Prompts, RequestBuilder
from mizzen.progress import ProgressBar
from mizzen.wire.server.request_validation import CANNOT_GENERATE

PREFILL_TOKENS = 8192
"""Default of `prefill_chunk_tokens`, except on large GPUs."""
LARGE_GPU_PREFILL_TOKENS = 16384
"""Default of `prefill_chunk_tokens` on large GPUs. Large steps increase throughput; the longer time between
tokens does not matter, because no client waits for single tokens."""
LARGE_GPU_BYTES = 64 << 30
"""Minimum memory in bytes of a large GPU. A step of `LARGE_GPU_PREFILL_TOKENS` needs only a small part of
it."""


class LLM:
    """A model that runs in this process.

    >>> with LLM("demo", device="cpu") as llm:
    ...     print(llm.generate(["Hello"], SamplingParams(temperature=0))[0].text)

    Not thread-safe.
    """

    @suggest_keywords
    def __init__(
        self,
        model: str | Path,
        *,
        skip_tokenizer: bool = False,
        device: Literal["cuda", "cpu"] | None = None,
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        load_format: Literal["safetensors", "dummy"] = "safetensors",
        quantization: Literal["auto", "fp8", "int8", "w4a16"] = "auto",
        model_implementation: Literal["auto", "native", "transformers"] = "auto",
        context_length: int | None = None,
        tensor: int = 1,
        expert: int | None = None,
        all_reduce: Literal[
            "auto", "nccl", "one-shot", "two-shot", "push", "fused", "fused-two-shot"
        ] = "auto",
        threads: int | None = None,
        mask_threads: int | None = None,
        images: Literal["auto", "off"] = "auto",
        image_cache_tokens: int | None = None,
        max_running_requests: int = 256,
        max_waiting_requests: int = 2048,
        memory_fraction: float = 0.9,
        kv_cache_tokens: int | None = None,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        prefill_chunk_tokens: int | None = None,
        max_step_milliseconds: float = math.inf,
        page_size: int = 16,
        prefix_cache: Literal["radix", "none"] = "radix",
        eviction: Literal["lru", "lfu", "fifo", "mru", "slru", "priority"] = "lru",
        policy: Literal["fcfs", "lpm", "dfs-weight", "priority"] = "fcfs",
        attention_prefill: Literal[
            "auto", "cpu", "fa3", "flashinfer", "flashinfer-fa3", "reference"
        ] = "auto",
        attention_decode: Literal[
            "auto", "cpu", "fa3", "flashinfer", "flashinfer-fa3", "reference", "split"
        ] = "auto",
        cuda_graph: Literal["auto", "off"] = "auto",
        cuda_graph_max_batch: int = 512,
        cuda_graph_max_tokens: int | None = None,
        fusion: Literal["auto", "off"] = "auto",
        expert_load: Literal["on", "off"] = "off",
        steps_in_flight: int = 2,
        profile: str = "",
        profile_steps: int = 32,
        check_integrity: bool = False,
    ) -> None:
        """Load a model.

        The arguments from `device` on are the options of `mizzen serve` with the same names.

        Args:
            model: Folder with config.json, the tokenizer and safetensors; "demo" for the packaged demo model.
            skip_tokenizer: Whether to use only token ids; `Completion.text` then stays empty.
            device: Device that the model runs on; by default cuda if there is a GPU, and otherwise cpu.
            dtype: Precision of weights and KV cache; auto is the checkpoint's precision on cuda,
                bfloat16 for quantized weights there, and float32 on cpu.
            load_format: Source of the weights; dummy fills them with seeded random values.
            quantization: Quantization of the weights while an unquantized checkpoint is loaded: fp8 (e4m3,
                with quantized activations), int8 or w4a16 (4-bit integers in groups of 128), by rounding
                to nearest; auto keeps the checkpoint's format.
            model_implementation: Code that computes the model: native is Mizzen's own, transformers is
                that of Transformers with Mizzen's attention; auto is native where Mizzen supports the
                architecture, else transformers.
            context_length: Maximum number of prompt and output tokens together; by default the model's
                limit.
            tensor: Tensor parallel size: number of ranks (GPUs) that share the model.
            expert: Expert parallel size: number of groups of ranks that hold different experts of a mixture,
                a divisor of the tensor parallel size; the smallest possible one by default. The ranks of a
                group share the width of each expert.
            all_reduce: All-reduce algorithm of ranks on cuda; auto selects the fastest one for each
                message size.
            threads: Number of CPU threads for the model on cpu; all cores by default.
            mask_threads: Number of CPU threads for structured output masks; by default half of the CPUs
                that the ranks do not use, at most 12.
            images: Images in prompts: auto accepts them if the model supports them; off serves its text
                part alone.
            image_cache_tokens: Number of embeddings of images that are kept on the device; by default
                enough for two images of the largest size, and for four times the largest number of prompt
                tokens in a step.
            max_running_requests: Maximum number of requests that decode together.
            max_waiting_requests: Maximum number of requests queued in the engine.
            memory_fraction: Fraction of the device's memory that weights, KV cache and the memory of a
                step may use.
            kv_cache_tokens: Capacity of the KV cache in tokens; derived from free memory by default.
            kv_cache_dtype: Precision of the KV cache: auto is the precision of the weights; fp8 (e4m3, on
                cuda) fits twice as many tokens into the same memory and is read faster.
            prefill_chunk_tokens: Maximum number of prompt tokens in one step (chunked prefill); by
                default 16,384 on a GPU with at least 64 GiB, and otherwise 8,192.
            max_step_milliseconds: While streams run, a step gets only as much prefill and image encoding
                as fits into this time.
            page_size: Number of tokens per KV cache page.
            prefix_cache: Prefix cache, which reuses the KV of common prefixes; none turns it off.
            eviction: Eviction policy of the prefix cache.
            policy: Scheduling policy: order of the waiting requests.
            attention_prefill: Attention backend for prefill.
            attention_decode: Attention backend for decode.
            cuda_graph: Run decode steps and short steps with prefill as CUDA graphs, if the attention
                backend supports it.
            cuda_graph_max_batch: Largest batch size to capture CUDA graphs for.
            cuda_graph_max_tokens: Largest step with prefill to capture CUDA graphs for, in tokens (0:
                none); by default the largest step that the GPU runs in less time than the host needs to
                launch it.
            fusion: On cuda, use fused kernels instead of separate operations.
            expert_load: Count the tokens of each expert of a mixture for a metric; off saves a few small
                kernels in each step.
            steps_in_flight: Number of steps that are launched before the tokens of the first one are
                read.
            profile: Folder for step traces; each SIGUSR2 records one trace. Steps are also marked as NVTX
                ranges. Empty: no profiling.
            profile_steps: Number of steps per trace.
            check_integrity: Check the consistency of pages, slots and prefix tree whenever the engine is
                idle.

        Raises:
            TypeError: an argument is unknown; the message names the argument to use instead.
            ValueError: an argument, the model or its tokenizer cannot be used; the message says which and
                why.
        """
        from mizzen.engine.loading.loader import load_engine

        device = device or ("cuda" if has_gpu() else "cpu")
        if prefill_chunk_tokens is None:
            large = device == "cuda" and gpu_bytes() >= LARGE_GPU_BYTES
            prefill_chunk_tokens = LARGE_GPU_PREFILL_TOKENS if large else PREFILL_TOKENS
        self.options = EngineOptions(
            model=str(find_demo_model(str(model)) or model),
            device=device,
            dtype=dtype,
            load_format=load_format,
            quantization=quantization,
            model_implementation=model_implementation,
            context_length=context_length,
            tensor=tensor,
            expert=expert,
            all_reduce=all_reduce,
            threads=threads,
            mask_threads=mask_threads,
            images=images,
            image_cache_tokens=image_cache_tokens,
            max_running_requests=max_running_requests,
            max_waiting_requests=max_waiting_requests,
            memory_fraction=memory_fraction,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_dtype=kv_cache_dtype,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_step_milliseconds=max_step_milliseconds,
            page_size=page_size,
            prefix_cache=prefix_cache,
            eviction=eviction,
            policy=policy,
            attention_prefill=attention_prefill,
            attention_decode=attention_decode,
            cuda_graph=cuda_graph,
            cuda_graph_max_batch=cuda_graph_max_batch,
            cuda_graph_max_tokens=cuda_graph_max_tokens,
            fusion=fusion,
            expert_load=expert_load,
            steps_in_flight=steps_in_flight,
            profile=profile,
            profile_steps=profile_steps,
            check_integrity=check_integrity,
        )
        self.tokenizer = None if skip_tokenizer else Tokenizer.load(self.options.model)
        self._ranks = start_ranks(self.options)
        try:
            self.engine: Engine = load_engine(
                self.options, followers=self._ranks and self._ranks.connect_followers()
            )
        except BaseException:
            if self._ranks:
                self._ranks.close()
            raise
        self._conversations: ConversationEncoder | None = None
        self._requests = RequestBuilder(self.engine.info, self.tokenizer, self.engine.image_rules)

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
        prompts: GenerationPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Generate a completion for each prompt.

        Args:
            prompts: Any number of prompts, as texts, as lists of token ids, or as `ImagePrompt`s.
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
            raise ValueError(CANNOT_GENERATE[self.engine.info.task])
        entries = self._requests.build_entries(prompts, params)
        if not entries:
            return []
        batch = Batch(self.engine, entries, self.options.max_waiting_requests)
        self._run_batch(batch, len(entries), progress)
        return [build_completion(entry, self.tokenizer) for entry in entries]

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "mean", "cls"] | None = None,
        normalize: bool = True,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Return one embedding for each prompt, float32 [prompts, size].

        If `prompts` is empty, the shape of the result is [0, 0].

        Args:
            prompts: Any number of prompts, as texts or as lists of token ids.
            pooling: "last" for the last token's hidden state (after the final norm), "mean" for the mean over
                all tokens, "cls" for the first token's; None for the model's own pooling
                (`1_Pooling/config.json`, else "last", or for encoders "mean", or that of their classification
                head).
            normalize: Whether to scale vectors to length 1.
            progress: Whether to show a progress bar; by default only if standard error is a terminal.

        Raises:
            ValueError: a prompt is invalid, or the pooling is unknown; earlier prompts may have run.
            RuntimeError: a request failed.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list: [prompt] for a single one")
        kind = (self.engine.info.pooling or Pooling.LAST) if pooling is None else pooling
        if kind not in list(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(Pooling)}, not {kind!r}")
        entries = self._requests.build_embedding_entries(prompts, Pooling(kind), normalize)
        vectors = self._compute_vectors(entries, len(prompts), progress)
        return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    def classify(
        self,
        prompts: Prompts,
        *,
        activation: Literal["softmax", "sigmoid", "none"] | None = None,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Return the scores of a classifier's labels for each prompt, float32 [prompts, labels].

        `llm.engine.info.labels` has the names of the labels. A reranker with a classification head has one
        label.

        Args:
            prompts: Any number of prompts, as texts or as lists of token ids.
            activation: Function that maps logits to scores: "softmax", "sigmoid", or "none" for the logits;
                None for the model's own (`problem_type` in config.json, else "sigmoid" for one label and
                "softmax" for several).
            progress: Whether to show a progress bar; by default only if standard error is a terminal.

        Raises:
            ValueError: a prompt is invalid, the activation is unknown, or the model is no classifier; earlier
                prompts may have run.
            RuntimeError: a request failed.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list: [prompt] for a single one")
        info = self.engine.info
        if info.task is not Task.CLASSIFY:
            raise ValueError(
                "the model has no classification head: use a model whose architecture ends with "
                "ForSequenceClassification, or embed"
            )
        chosen = info.score_activation if activation is None else activation
        if chosen not in list(ScoreActivation):
            raise ValueError(f"activation must be one of {', '.join(ScoreActivation)}, not {chosen!r}")
        entries = self._requests.build_embedding_entries(prompts, Pooling.LAST, False, classify=True)
        vectors = self._compute_vectors(entries, len(prompts), progress)
        logits = np.stack(vectors) if vectors else np.empty((0, len(info.labels)), np.float32)
        return apply_activation(logits, ScoreActivation(chosen))

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
                such as {"role": "user", "content": "Hi"}. The content may be a list of parts, such as
                {"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:…"}}, or
                {"type": "image", "image": "ship.jpg"} with a path or the bytes of a file.
            params: Sampling parameters, as in `generate`.
            progress: Whether to show a progress bar, as in `generate`.

        Returns:
            One completion for each conversation, in the same order.

        Raises:
            ValueError: the model has no chat template, a part is invalid, the template rejects the messages,
                or `generate` rejects a prompt or its parameters.
            RuntimeError: a request failed.
        """
        if self.tokenizer is None:
            raise ValueError("a conversation needs the tokenizer: do not skip it")
        if self._conversations is None:
            self._conversations = ConversationEncoder(self.options.model, self.engine.image_rules)
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        chats: Any = [conversations] if single else conversations
        prompts = [self._conversations.encode(index, messages) for index, messages in enumerate(chats)]
        return self.generate(prompts, params, progress=progress)

    def _compute_vectors(
        self, entries: Iterator[BatchEntry], count: int, progress: bool | None
    ) -> list[NDArray[np.float32]]:
        """Return the vectors of `count` prompts; encoders compute while later prompts are tokenized."""
        # With a prefix cache, tokens of prompts do not say how much work waits.
        cached = self.engine.info.pages_total > 0
        most = math.inf if cached else STEPS_AHEAD * self.options.prefill_chunk_tokens
        batch = Batch(self.engine, entries, self.options.max_waiting_requests, most)
        self._run_batch(batch, count, progress)
        return [entry.vector for entry in batch.entries if entry.vector is not None]

    def _run_batch(self, batch: Batch, count: int, progress: bool | None) -> None:
        """Run a batch of `count` requests; without `progress`, only a terminal gets a progress bar."""
        if sys.stderr.isatty() if progress is None else progress:
            with ProgressBar(count) as bar:
                batch.run(bar.advance)
        else:
            batch.run(lambda finished, tokens: None)

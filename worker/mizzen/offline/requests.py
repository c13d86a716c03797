# SPDX-License-Identifier: Apache-2.0
"""Builds the engine's requests from prompts and sampling parameters."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from mizzen.core.request import Int32, Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.info import EngineInfo
from mizzen.gateway.text.stream import TextStream
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.images.types import ImageRules, InvalidImage
from mizzen.offline.batch import BatchEntry
from mizzen.offline.image_prompts import ImagePrompt, PreparedImages, prepare_images

Prompts = Sequence[str] | Sequence[Sequence[int] | Int32]
"""Prompts as texts, or as lists or arrays of token ids."""
GenerationPrompts = Prompts | Sequence[ImagePrompt]
"""Prompts, possibly with images."""


class RequestBuilder:
    """Builds requests with unique ids for one engine."""

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer | None, image_rules: ImageRules | None = None
    ) -> None:
        """Create a builder for a model.

        Args:
            info: Limits of the model.
            tokenizer: Tokenizer for prompts that are texts; None if all prompts are token ids.
            image_rules: Rules for images; None if the model reads text only.
        """
        self._info = info
        self._tokenizer = tokenizer
        self._image_rules = image_rules
        self._rids = itertools.count(1)

    def build_entries(
        self, prompts: GenerationPrompts, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[BatchEntry]:
        """Return an entry for each prompt, for generation.

        Args:
            prompts: Prompts as texts or as lists of token ids, or with images.
            params: Parameters for all prompts, or one per prompt; None for the defaults.

        Raises:
            ValueError: a prompt or its parameters are invalid.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"params must be one or one per prompt, not {len(params)} for {len(prompts)} prompts"
            )
        return [self._build_entry(i, prompt, params[i]) for i, prompt in enumerate(prompts)]

    def build_embedding_entries(
        self, prompts: Prompts, pooling: Pooling, normalize: bool, *, classify: bool = False
    ) -> Iterator[BatchEntry]:
        """Yield an entry for each prompt, for embeddings, or with `classify` for the logits of labels.

        Raises:
            ValueError: a prompt is invalid.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        for i, prompt in enumerate(prompts):
            ids = self._token_ids(i, prompt)
            yield BatchEntry(self._build_request(ids, sampling, pooling, normalize, classify), None)

    def _build_entry(
        self, index: int, prompt: str | Sequence[int] | Int32 | ImagePrompt, params: SamplingParams
    ) -> BatchEntry:
        prepared = self._prepare(index, prompt)
        if fault := params.token_fault(self._info.vocab_size):
            raise ValueError(fault)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need the tokenizer: use stop_token_ids, or do not skip it")
        stream = TextStream(self._tokenizer, params.stop) if params.stop and self._tokenizer else None
        request = self._build_request(prepared.ids, params)
        if prepared.images:
            rotary = prepared.rotary
            request = replace(
                request,
                images=prepared.images,
                rotary=rotary and rotary.positions,
                rotary_offset=rotary.offset if rotary else 0,
            )
        return BatchEntry(request, stream, prepared.files)

    def _prepare(self, index: int, prompt: str | Sequence[int] | Int32 | ImagePrompt) -> PreparedImages:
        """Tokenize and check a prompt, and prepare its images.

        Raises:
            ValueError: the prompt or an image is invalid; the message contains the prompt's `index`.
        """
        if not isinstance(prompt, ImagePrompt) or not prompt.images:
            text = prompt.prompt if isinstance(prompt, ImagePrompt) else prompt
            return PreparedImages(ids=self._token_ids(index, text))
        if self._image_rules is None:
            raise ValueError(f"prompt {index} has images, but the model reads text only")
        ids = self._token_ids(index, prompt.prompt)
        try:
            prepared = prepare_images(ids, prompt.images, self._image_rules)
        except (InvalidImage, OSError) as error:
            raise ValueError(f"prompt {index}: {error}") from error
        self._check_length(index, len(prepared.ids))
        return prepared

    def _token_ids(self, index: int, prompt: str | Sequence[int] | Int32) -> Int32:
        """Tokenize a prompt if it is text, check its length and ids, and return the token ids.

        Raises:
            ValueError: the prompt is invalid; the message contains its `index`.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(f"prompt {index} is text, but the tokenizer is skipped: give token ids")
            prompt = self._tokenizer.encode(prompt)
        info = self._info
        ids = np.asarray(prompt, dtype=np.int64)
        self._check_length(index, ids.size if ids.ndim == 1 else 0)
        if ids.view(np.uint64).max() >= info.vocab_size:  # negative numbers become large ones
            raise ValueError(f"prompt {index} holds ids outside the vocabulary (0 to {info.vocab_size - 1})")
        return ids.astype(np.int32)

    def _check_length(self, index: int, tokens: int) -> None:
        context = self._info.context_length
        if not 0 < tokens < context:
            raise ValueError(
                f"prompt {index} has {tokens} tokens; it must have 1 to {context - 1} "
                f"(context length {context}, an output token included)"
            )

    def _build_request(
        self,
        ids: Int32,
        params: SamplingParams,
        pooling: Pooling | None = None,
        normalize: bool = True,
        classify: bool = False,
    ) -> Request:
        return Request(
            rid=next(self._rids),
            prompt=ids,
            sampling=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed % 2**64,
            pooling=pooling,
            normalize=normalize,
            classify=classify,
            arrival=time.monotonic(),
        )

# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat template of a model (`TextModel`), and the registry of loaded text models."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.gateway.text.image_marks import added_tokens, new_mark
from mizzen.gateway.text.pooling import model_pooling
from mizzen.gateway.text.template import ChatTemplate, read_json
from mizzen.gateway.text.tokenizer import TOKENIZER, Tokenizer
from mizzen.gateway.text.tokenizer_info import describe_tokenizer
from mizzen.images.rules import read_image_rules
from mizzen.images.types import ImageRules

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
IMAGE_FILES = (CONFIG, PREPROCESSOR)
"""Files from which the rules for images are read; text models are built without them."""
LONG_CHARACTERS = 4096
"""Length in characters above which a text is tokenized in a thread."""
HUGE_CHARACTERS = 1 << 19
"""Length in characters above which only `MAX_CONCURRENT_HUGE` texts are tokenized at a time.

The limit bounds memory: during tokenization, a token takes several hundred bytes.
"""
MAX_CONCURRENT_HUGE = 2
VALUE_CHARACTERS = 16
"""Estimated number of characters that a chat template adds around each JSON value of a message."""
MAX_LOADED = 4
"""Number of text models that stay loaded even if no engine uses them."""

T = TypeVar("T")


class TooManyTokens(ValueError):
    """A text has more tokens than allowed; `at_least` is a lower bound on their number."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


class NoChatTemplate(ValueError):
    """The model has no chat template and therefore does not support conversations."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer, chat template and default pooling of the models with one `tokenizer_hash`."""

    name: str
    """`tokenizer_hash` of the models."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    pooling: Pooling | None = Pooling.LAST
    """Default pooling of the models' embeddings; None if the gateway does not support their pooling."""
    description: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    """The tokenizer's configuration, for /tokenizer_info."""
    image_rules: ImageRules | None = field(default=None, compare=False, repr=False)
    """Rules for images; None if the models read text only."""
    huge_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_HUGE), compare=False, repr=False
    )
    """Semaphore that limits concurrent tokenization of huge texts."""

    @property
    def template_source(self) -> str:
        """Source of all chat templates; empty if the model has none."""
        return "" if self.template is None else self.template.source

    async def chat_prompt(
        self,
        messages: tuple[dict[str, Any], ...],
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        max_tokens: int = 0,
        finish: Callable[[str], str] | None = None,
        added_characters: int = 0,
    ) -> Int32:
        """Return the token ids (int32 [n]) of a conversation; `arguments` are variables of the template.

        `finish` changes the prompt that the template renders, and adds `added_characters` to it.

        Raises:
            NoChatTemplate: the model has no chat template.
            TooManyTokens: the text is so long that it must have more than `max_tokens` tokens (0: no limit);
                raised before tokenization.
            TemplateError: the template rejects the messages.
        """

        def work() -> Int32:
            if self.template is None:
                raise NoChatTemplate("the model has no chat template; use /v1/completions")
            text = self.template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(arguments or {}),
            )
            text = text if finish is None else finish(text)
            return self._encode(text, add_special_tokens, max_tokens)

        return await self._run(
            lambda limit: added_characters + estimate_characters((messages, arguments or {}), limit), work
        )

    async def text_prompt(self, text: str, add_special_tokens: bool = True, max_tokens: int = 0) -> Int32:
        """Return the token ids (int32 [n]) of a text, with the tokenizer's own special tokens if requested.

        Raises:
            TooManyTokens: the text is so long that it must have more than `max_tokens` tokens (0: no limit);
                raised before tokenization.
        """
        return await self._run(
            lambda _: len(text), lambda: self._encode(text, add_special_tokens, max_tokens)
        )

    async def batch_prompts(
        self, texts: Sequence[str], add_special_tokens: bool = True, max_tokens: int = 0, cut: bool = False
    ) -> list[Int32 | TooManyTokens]:
        """Return the token ids (int32 [n]) of each text, as `text_prompt` does, tokenized together.

        With `cut`, a text of more than `max_tokens` tokens is cut at its end. Otherwise the result has a
        `TooManyTokens` for each text that is so long that it must have more than `max_tokens` tokens.
        """

        def work() -> list[Int32 | TooManyTokens]:
            excess = [None if cut else self._find_excess(text, max_tokens) for text in texts]
            accepted = [text for text, error in zip(texts, excess, strict=True) if error is None]
            encoded = iter(
                self.tokenizer.encode_batch(accepted, add_special_tokens, max_tokens if cut else 0)
            )
            return [np.array(next(encoded), np.int32) if error is None else error for error in excess]

        return await self._run(lambda _: sum(map(len, texts)), work)

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """Run `work`, which tokenizes texts of a total length, on the event loop or, if long, in a thread."""
        return await self._run(lambda _: characters, work)

    async def _run(self, size: Callable[[int], int], work: Callable[[], T]) -> T:
        """Run `work` on the event loop for a short text, or in a thread for a long one.

        `size(limit)` returns the text's number of characters; it may stop counting once this exceeds `limit`.
        """
        if size(LONG_CHARACTERS) <= LONG_CHARACTERS:
            return work()
        if await asyncio.to_thread(size, HUGE_CHARACTERS) <= HUGE_CHARACTERS:
            return await asyncio.to_thread(work)
        async with self.huge_slots:
            return await asyncio.to_thread(work)

    def _find_excess(self, text: str, max_tokens: int) -> TooManyTokens | None:
        """Return the error for a text so long that it must have more than `max_tokens` tokens, else None."""
        if (
            max_tokens
            and len(text) > LONG_CHARACTERS
            and (characters_per_token := self.tokenizer.characters_per_token)
        ):
            at_least = -(-len(text) // characters_per_token)
            if at_least > max_tokens:
                return TooManyTokens(at_least)
        return None

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> Int32:
        if error := self._find_excess(text, max_tokens):
            raise error
        return np.array(self.tokenizer.encode(text, add_special_tokens), dtype=np.int32)


def estimate_characters(value: object, limit: int = LONG_CHARACTERS) -> int:
    """Return the approximate length of a JSON value as text, in characters; counting stops above `limit`."""
    waiting, total = [value], 0
    while waiting and total <= limit:
        item = waiting.pop()
        total += VALUE_CHARACTERS
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += sum(map(len, item))
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return total


def build_text_model(name: str, files: Mapping[str, bytes]) -> TextModel:
    """Build a text model from its files; `files` maps file names to contents.

    Raises:
        TokenizerError, TemplateError: a file is missing or invalid.
    """
    rules = image_rules(files)
    mark = None if rules is None else new_mark(rules.placeholder)
    return TextModel(
        name,
        Tokenizer.from_files(files, mark),
        ChatTemplate.from_files(files, mark),
        model_pooling(files),
        describe_tokenizer(files),
        rules,
    )


def image_rules(files: Mapping[str, bytes]) -> ImageRules | None:
    """Return a model's rules for images, which follow from its `IMAGE_FILES`; None for a text model.

    Raises:
        TemplateError: a file is not a JSON object.
        ValueError: a file has an invalid value.
    """
    if CONFIG not in files:
        return None
    config, preprocessor = read_json(files, CONFIG), read_json(files, PREPROCESSOR)
    return read_image_rules(config, preprocessor, added_tokens(files.get(TOKENIZER, b"")))


class TextModels:
    """Registry of text models by `tokenizer_hash`; keeps the `MAX_LOADED` most recently used ones."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, TextModel] = OrderedDict()
        self._building = asyncio.Lock()

    def get(self, name: str) -> TextModel | None:
        """Return a text model; None if it is not loaded."""
        model = self._models.get(name)
        if model is not None:
            self._models.move_to_end(name)
        return model

    async def get_or_build(self, name: str, files: Mapping[str, bytes]) -> TextModel:
        """Return a text model; build it from its files if it is not loaded.

        Models are built one at a time, so that each is built once even if several engines send its files.

        Raises:
            TokenizerError, TemplateError: a file is missing or invalid.
        """
        async with self._building:
            model = self.get(name)
            if model is None:
                model = await asyncio.to_thread(build_text_model, name, files)
                self.add(model)
        return model

    def add(self, model: TextModel) -> None:
        """Add a text model; if there are more than `MAX_LOADED`, drop the least recently used one.

        Engines that use the dropped model can still do so, because they hold references to it.
        """
        self._models[model.name] = model
        while len(self._models) > MAX_LOADED:
            self._models.popitem(last=False)

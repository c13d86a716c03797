"""A revision's text side: its tokenizer and chat template, and the registry of those in use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.gateway.text.pooling import model_pooling
from mizzen.gateway.text.template import ChatTemplate
from mizzen.gateway.text.tokenizer import Tokenizer

LONG_CHARACTERS = 4096
"""Longer texts are tokenized off the event loop."""
HUGE_CHARACTERS = 1 << 19
"""Longer ones by few at a time: while it is made, a token takes some hundred bytes."""
HUGE_AT_ONCE = 2
VALUE_CHARACTERS = 16
"""About what a value takes in a rendered text, beside what it holds."""
KEPT = 4
"""Text models that stay loaded, whether or not an engine still has them."""


class TooManyTokens(ValueError):
    """A text has more tokens than are wanted, at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens")
        self.least = least


class NoChatTemplate(ValueError):
    """The model has no chat template, so there is no prompt for a conversation."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer and chat template of one `tokenizer_hash`."""

    name: str
    """The `tokenizer_hash`."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    pooling: Pooling | None = Pooling.LAST
    """What the model's embeddings are by default; None where it is none that is served."""
    turns: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(HUGE_AT_ONCE), compare=False, repr=False
    )
    """Of huge texts."""

    async def chat_prompt(
        self,
        messages: tuple[dict[str, Any], ...],
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        most: int = 0,
    ) -> Int32:
        """Return the token ids [n] of a conversation; `arguments` are variables of the template.

        Raises:
            NoChatTemplate: the model has none.
            TooManyTokens: there are more than `most` (not 0), which was clear before they were made.
            TemplateError: the template refuses the messages.
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
            return self._ids(text, add_special_tokens, most)

        return await self._run(lambda most: characters((messages, arguments or {}), most), work)

    async def text_prompt(self, text: str, add_special_tokens: bool = True, most: int = 0) -> Int32:
        """Return the token ids [n] of a text; the tokenizer's own special tokens around it if asked for.

        Raises:
            TooManyTokens: as in `chat_prompt`.
        """
        return await self._run(lambda _: len(text), lambda: self._ids(text, add_special_tokens, most))

    async def _run(self, size: Callable[[int], int], work: Callable[[], Int32]) -> Int32:
        """Do the work where its text's size allows; `size` counts characters, up to a number."""
        if size(LONG_CHARACTERS) <= LONG_CHARACTERS:
            return work()
        if await asyncio.to_thread(size, HUGE_CHARACTERS) <= HUGE_CHARACTERS:
            return await asyncio.to_thread(work)
        async with self.turns:
            return await asyncio.to_thread(work)

    def _ids(self, text: str, add_special_tokens: bool, most: int) -> Int32:
        if most and len(text) > LONG_CHARACTERS and (each := self.tokenizer.characters_per_token):
            least = -(-len(text) // each)
            if least > most:
                raise TooManyTokens(least)
        return np.array(self.tokenizer.encode(text, add_special_tokens), dtype=np.int32)


def characters(value: object, most: int = LONG_CHARACTERS) -> int:
    """Return about how long the text of a JSON value is; nothing is counted beyond `most`."""
    waiting, total = [value], 0
    while waiting and total <= most:
        one = waiting.pop()
        total += VALUE_CHARACTERS
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            total += sum(map(len, one))
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return total


def build(name: str, files: Mapping[str, bytes]) -> TextModel:
    """Build a text model from its files.

    Raises:
        TokenizerError, TemplateError: a file is missing or cannot be read.
    """
    return TextModel(name, Tokenizer.from_files(files), ChatTemplate.from_files(files), model_pooling(files))


class TextModels:
    """Text models by `tokenizer_hash`; the ones used last stay."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, TextModel] = OrderedDict()
        self._building = asyncio.Lock()

    def get(self, name: str) -> TextModel | None:
        """Return a model that is loaded."""
        model = self._models.get(name)
        if model is not None:
            self._models.move_to_end(name)
        return model

    async def build(self, name: str, files: Mapping[str, bytes]) -> TextModel:
        """Return a model made of its files: once, and one after another, however many engines bring them.

        Raises:
            TokenizerError, TemplateError: a file is missing or cannot be read.
        """
        async with self._building:
            model = self.get(name)
            if model is None:
                model = await asyncio.to_thread(build, name, files)
                self.add(model)
        return model

    def add(self, model: TextModel) -> None:
        """Keep a model; engines hold theirs themselves, so the ones used least recently may go."""
        self._models[model.name] = model
        while len(self._models) > KEPT:
            self._models.popitem(last=False)

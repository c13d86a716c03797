"""Log probabilities of tokens, in the forms of both generating endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mizzen.gateway.openai.response_bodies import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that came, or could have."""

    id: int
    data: bytes
    """Its text in UTF-8, or a part of a character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt."""

    id: int
    data: bytes
    logprob: float | None
    """None for a prompt's first token, which nothing predicts."""
    offset: int
    """Where its text begins, in characters of the choice's text."""
    top: tuple[Candidate, ...] = ()
    """The most probable tokens in its place, as many as were asked for, the most probable first."""


def scored(tokenizer: Tokenizer, entry: TokenLogprobs, offset: int) -> ScoredToken:
    """Return a token with its text."""
    data = tokenizer.token_bytes
    top = tuple(Candidate(token, data(token), logprob) for token, logprob in entry.top)
    return ScoredToken(entry.token, data(entry.token), entry.logprob, offset, top)


def scored_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprobs], skip_special_tokens: bool
) -> list[ScoredToken]:
    """Return a prompt's tokens, which `entries` has from the second on."""
    offsets = tokenizer.detokenizer(skip_special_tokens)
    found: list[ScoredToken] = []
    offset = 0
    for index, token in enumerate(prompt):
        if index == 0:
            found.append(ScoredToken(token, tokenizer.token_bytes(token), None, 0))
        elif index <= len(entries):
            found.append(scored(tokenizer, entries[index - 1], offset))
        offset += len(offsets.add((token,)))
    return found


def chat_logprobs(tokens: Iterable[ScoredToken], as_ids: bool) -> ChatLogprobs:
    """Return log probabilities in chat's form."""
    return ChatLogprobs(
        [
            TokenLogprob(
                named(token.id, token.data, as_ids),
                token.logprob or 0.0,
                list(token.data),
                [
                    TopLogprob(named(one.id, one.data, as_ids), one.logprob, list(one.data))
                    for one in token.top
                ],
            )
            for token in tokens
        ]
    )


def text_logprobs(tokens: Sequence[ScoredToken], as_ids: bool) -> TextLogprobs:
    """Return log probabilities in columns. A part of a character is named as `bytes:\\xe2`."""

    def name(token: ScoredToken | Candidate) -> str:
        return named(token.id, token.data, as_ids, parts=True)

    def top(token: ScoredToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found = {name(one): one.logprob for one in token.top}
        return found if name(token) in found else {**found, name(token): token.logprob}

    return TextLogprobs(
        [token.offset for token in tokens],
        [token.logprob for token in tokens],
        [name(token) for token in tokens],
        [top(token) for token in tokens],
    )


def named(token: int, data: bytes, as_ids: bool, parts: bool = False) -> str:
    """Return a token's name: its text, or `token_id:<id>`.

    A part of a character is U+FFFD, or with `parts` its bytes: two parts must not have one name.
    """
    if as_ids:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        if parts:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return data.decode(errors="replace")

"""Log probabilities of tokens, in the forms of both generating endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mizzen.gateway.openai.response_bodies import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from mizzen.gateway.requests.token_logprobs import ScoredToken, TopToken


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

    def name(token: ScoredToken | TopToken) -> str:
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

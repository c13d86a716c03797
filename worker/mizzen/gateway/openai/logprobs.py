# SPDX-License-Identifier: Apache-2.0
"""Convert log probabilities to the JSON shapes of chat and text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mizzen.gateway.openai.response_bodies import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from mizzen.gateway.requests.token_logprobs import ScoredToken, TopToken


def chat_logprobs(tokens: Iterable[ScoredToken], as_ids: bool) -> ChatLogprobs:
    """Return tokens' log probabilities in the shape of chat completions; `as_ids` names tokens by id."""
    return ChatLogprobs(
        [
            TokenLogprob(
                token_name(token.id, token.data, as_ids),
                token.logprob or 0.0,
                list(token.data),
                [
                    TopLogprob(
                        token_name(candidate.id, candidate.data, as_ids),
                        candidate.logprob,
                        list(candidate.data),
                    )
                    for candidate in token.top
                ],
            )
            for token in tokens
        ]
    )


def text_logprobs(tokens: Sequence[ScoredToken], as_ids: bool) -> TextLogprobs:
    r"""Return tokens' log probabilities as parallel lists, the shape of text completions.

    `as_ids` names tokens by id. Otherwise, a token with an incomplete character is named by its bytes,
    such as `bytes:\xe2`.
    """

    def name(token: ScoredToken | TopToken) -> str:
        return token_name(token.id, token.data, as_ids, raw_bytes=True)

    def top_entry(token: ScoredToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top_logprobs = {name(candidate): candidate.logprob for candidate in token.top}
        return top_logprobs if name(token) in top_logprobs else {**top_logprobs, name(token): token.logprob}

    return TextLogprobs(
        [token.offset for token in tokens],
        [token.logprob for token in tokens],
        [name(token) for token in tokens],
        [top_entry(token) for token in tokens],
    )


def token_name(token: int, data: bytes, as_ids: bool, raw_bytes: bool = False) -> str:
    """Return a token's name in log probabilities: its text, or `token_id:<id>` if `as_ids`.

    If the token is not valid UTF-8, such as part of a character, U+FFFD replaces the invalid bytes. With
    `raw_bytes`, the name spells out the bytes instead, so that different tokens get different names.
    """
    if as_ids:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        if raw_bytes:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return data.decode(errors="replace")

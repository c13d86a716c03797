# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of recent prompts, so that a prompt is scored only from where it differs from them.

lm-evaluation-harness sends one request per continuation by default. Each of them repeats the context, and
requests the log probabilities of all prompt tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mizzen.gateway.requests.prompt_scores.shared_prefixes import MIN_SHARED_TOKENS, count_common_tokens
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.wire.client.stream import TokenLogprobs

MAX_VALUES = 1 << 18
"""Maximum number of log probabilities that are kept, about 120 bytes each."""
MAX_ALIKE = 16
"""Maximum number of prompts that are kept with the same first tokens."""
START_BYTES = 4 * MIN_SHARED_TOKENS


@dataclass(frozen=True, slots=True)
class ScoreKey:
    """Properties of prompts with which equal tokens have equal log probabilities."""

    model: ModelIdentity
    """Model that scored them."""
    salt: bytes
    """Salt of the prefix cache; tenants with other salts must not learn which prompts were sent."""
    top: int
    """Number of most probable tokens at each position."""


@dataclass(frozen=True, slots=True)
class ScoredPrefix:
    """Beginning of a prompt whose log probabilities are known."""

    model: ModelIdentity
    """Model that scored it."""
    entries: Sequence[TokenLogprobs]
    """Log probabilities of its tokens from the second on."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the prefix."""
        return len(self.entries) + 1


class ScoredPrompts:
    """Prompts that were scored recently, as int32 token ids; the least recently used are dropped first."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        """Keep at most `max_values` log probabilities, of tokens and of the most probable ones together."""
        self._max_values = max_values
        self._values = 0
        self._entries: OrderedDict[tuple[ScoreKey, bytes], Sequence[TokenLogprobs]] = OrderedDict()
        self._alike: dict[tuple[ScoreKey, bytes], dict[bytes, None]] = {}
        """Prompts in `_entries` by key and first tokens, the least recently used first."""

    def find_prefix(self, key: ScoreKey, prompt: bytes) -> ScoredPrefix | None:
        """Return the longest known prefix of a prompt; None if fewer than `MIN_SHARED_TOKENS` are known."""
        alike = self._alike.get((key, prompt[:START_BYTES]))
        if not alike:
            return None
        tokens, best = max((count_common_tokens(other, prompt), other) for other in alike)
        self._mark_used(key, best)
        return ScoredPrefix(key.model, self._entries[key, best][: tokens - 1])

    def add(self, key: ScoreKey, prompt: bytes, entries: Sequence[TokenLogprobs]) -> None:
        """Keep the log probabilities of a prompt's tokens from the second on, unless they are too many."""
        size = self._size(key, entries)
        if len(prompt) < START_BYTES or size > self._max_values // 4:
            return
        if (key, prompt) not in self._entries:
            self._values += size
            self._entries[key, prompt] = entries
            self._alike.setdefault((key, prompt[:START_BYTES]), {})[prompt] = None
        self._mark_used(key, prompt)
        alike = self._alike[key, prompt[:START_BYTES]]
        if len(alike) > MAX_ALIKE:
            self._drop(key, next(iter(alike)))
        while self._values > self._max_values:
            self._drop(*next(iter(self._entries)))

    def _mark_used(self, key: ScoreKey, prompt: bytes) -> None:
        self._entries.move_to_end((key, prompt))
        alike = self._alike[key, prompt[:START_BYTES]]
        alike[prompt] = alike.pop(prompt)

    def _drop(self, key: ScoreKey, prompt: bytes) -> None:
        self._values -= self._size(key, self._entries.pop((key, prompt)))
        start = (key, prompt[:START_BYTES])
        del self._alike[start][prompt]
        if not self._alike[start]:
            del self._alike[start]

    @staticmethod
    def _size(key: ScoreKey, entries: Sequence[TokenLogprobs]) -> int:
        return len(entries) * (1 + key.top)

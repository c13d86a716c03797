"""How tokens of one request are chosen and when it ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `stop` holds strings; whoever holds text acts on them (the gateway, the offline class). The engine sees
    `stop_token_ids` only.
    """

    temperature: float = 1.0
    """0 chooses the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable, in [0, 1]."""
    seed: int | None = None
    """Makes the tokens reproducible, alone or in a batch; None draws one."""
    max_tokens: int | None = None
    """Output tokens at most; None means up to the context length."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens; `stop_token_ids` still end the request."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject values outside their range.

        Raises:
            ValueError: names the field, its value and the range.
        """
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
        )
        for name, value, good, rule in checks:
            if not good:
                raise ValueError(f"{name} must be {rule}, not {value}")

# SPDX-License-Identifier: Apache-2.0
"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import check, option, required
from mizzen.core.images.cost import EncodingCost
from mizzen.core.kv.eviction import STRATEGIES
from mizzen.core.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes of the state on the device, and the policies by which requests share that state."""

    pages_total: int = required("KV pages of the device")
    context_length: int = required("Maximum number of prompt plus output tokens of a request")
    page_size: int = option(16, "Tokens per KV page", low=1)
    max_running_requests: int = option(256, "Number of slots: requests that run at the same time", low=1)
    max_waiting_requests: int = option(2048, "Maximum number of new requests that wait for a slot", low=1)
    prefill_chunk_tokens: int = option(8192, "Maximum number of prompt tokens in one step", low=1)
    max_step_milliseconds: float | None = option(
        None, "Duration within which a step with prefill must stay while requests decode", low=1
    )
    end_token_ids: tuple[int, ...] = ()
    """Token ids that end a request unless it sets `ignore_eos`."""
    steps_in_flight: int = option(
        2, "Number of steps that are launched before the tokens of the first one are read", low=1, high=8
    )
    prefix_cache: str = option(
        "radix", "Cache that reuses the KV of common prefixes", choices=("radix", "none")
    )
    eviction: str = option("lru", "Eviction strategy of the prefix cache", choices=tuple(STRATEGIES))
    policy: str = option("fcfs", "Order in which waiting requests are admitted", choices=tuple(POLICIES))
    reserve_tokens: int = option(
        16, "Free KV, in tokens per running request, that admission leaves for their next tokens", low=0
    )
    check_integrity: bool = option(False, "Check pages, slots and prefix tree whenever the scheduler is idle")
    whole_prompts: bool = option(
        False, "Compute each prompt as a whole in one step and keep no KV, as encoders require"
    )
    image_capacity: int = option(
        0, "Number of embeddings of images that the device keeps; 0 for a model without images", low=0
    )
    encoding_cost: EncodingCost | None = None
    """Cost of encoding images in prompt tokens; None if an embedding costs as much as a prompt token."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a field is out of range; the message names it and the range.
        """
        check(self)
        lowest = {"pages_total": 0 if self.whole_prompts else 1, "context_length": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.whole_prompts and self.prefill_chunk_tokens < self.context_length - 1:
            raise ValueError(
                f"prefill_chunk_tokens must be at least {self.context_length - 1}, the longest prompt, which "
                f"is computed in one step, not {self.prefill_chunk_tokens}"
            )
        if self.capacity_tokens < 2:
            raise ValueError(
                "context_length and pages_total * page_size must be at least 2: prompt and output"
            )

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of prompt plus output tokens of a request: the smaller of the context length and
        the capacity of all pages. With `whole_prompts` no pages are needed."""
        if self.whole_prompts:
            return self.context_length
        return min(self.context_length, self.pages_total * self.page_size)

    @property
    def columns(self) -> int:
        """Width of the page table: the maximum number of pages of a request."""
        return 0 if self.whole_prompts else -(-self.capacity_tokens // self.page_size)

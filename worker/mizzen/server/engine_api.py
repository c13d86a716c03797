"""What the serving loop needs of an engine: the real one, or the simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mizzen.core.outputs import CacheEvents, GrammarCounts, Load, StepOutput
from mizzen.core.request import Finished, Request


class EngineInfoProtocol(Protocol):
    """What gateways are told about an engine, fixed once it is loaded."""

    @property
    def context_length(self) -> int:
        """Prompt plus output tokens that a request may have; the KV cache holds that many."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a request."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        ...

    @property
    def generates(self) -> bool:
        """Whether it continues prompts; some models embed alone."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Memory of its weights, of rank 0."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Memory of its KV cache."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Memory that captured graphs took, of rank 0."""
        ...

    @property
    def other_bytes(self) -> int:
        """What is in use beside weights, KV and graphs."""
        ...

    @property
    def step_bytes(self) -> int:
        """Memory that it keeps for slots and steps."""
        ...

    @property
    def device_bytes(self) -> int:
        """Memory of its device in all, of rank 0."""
        ...

    @property
    def free_bytes(self) -> int:
        """What of it was free once it was loaded."""
        ...


class EngineProtocol(Protocol):
    """An engine that is stepped from one thread. Requests' ids are small and dense."""

    @property
    def info(self) -> EngineInfoProtocol:
        """Its fixed properties."""
        ...

    @property
    def busy(self) -> bool:
        """Tell whether `step` has anything to do."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request, checked by the caller."""
        ...

    def abort(self, rid: int) -> None:
        """End a live request; its Finished follows in a step or in `drain_finished`."""
        ...

    def step(self, now: float) -> StepOutput | None:
        """Launch what can be launched and return the oldest step's output, if there is one.

        An idle engine uses it for checks of its own.
        """
        ...

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return ends that came without a step, once each."""
        ...

    def drain_cache_events(self) -> CacheEvents:
        """Return changes of the prefix cache since the last call."""
        ...

    def load(self) -> Load:
        """Return how busy the engine is."""
        ...

    @property
    def integrity_faults(self) -> int:
        """Faults of pages, slots and prefix tree found so far."""
        ...

    def drain_integrity_faults(self) -> Sequence[str]:
        """Return what was found since the last call, the first of it."""
        ...

    @property
    def grammar_counts(self) -> GrammarCounts:
        """What structured output cost so far."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...

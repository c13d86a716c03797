"""Protocol of an engine as the serving loop uses it.

Implemented by `mizzen.engine.engine.Engine`, with a real or a simulated runner, and by fakes in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mizzen.core.outputs import CacheEvents, GrammarCounts, Load, StepOutput
from mizzen.core.request import Finished, Request


class EngineInfoProtocol(Protocol):
    """Properties of a loaded engine that do not change and are reported to gateways."""

    @property
    def context_length(self) -> int:
        """Maximum number of prompt plus output tokens of a request; the KV cache can hold one."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids: valid ids are 0 to `vocab_size` - 1."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a request."""
        ...

    @property
    def page_size(self) -> int:
        """Number of tokens per KV page."""
        ...

    @property
    def generates(self) -> bool:
        """Whether the model generates text; some models only embed."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Memory of rank 0's weights."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Memory of rank 0's captured CUDA graphs."""
        ...

    @property
    def other_bytes(self) -> int:
        """Memory in use besides weights, KV cache and graphs."""
        ...

    @property
    def step_bytes(self) -> int:
        """Memory reserved for slots and steps."""
        ...

    @property
    def device_bytes(self) -> int:
        """Total memory of rank 0's device."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free memory of rank 0's device after loading."""
        ...


class EngineProtocol(Protocol):
    """Engine that is stepped from one thread; request ids are small and dense."""

    @property
    def info(self) -> EngineInfoProtocol:
        """Fixed properties of the engine."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request that the caller has validated."""
        ...

    def abort(self, rid: int) -> None:
        """End a live request; its Finished follows in a step or in `drain_finished`."""
        ...

    def step(self, now: float) -> StepOutput | None:
        """Launch a step if possible; return the output of the oldest completed step, or None.

        An idle engine uses the call for its own consistency checks.
        """
        ...

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return requests that finished outside a step, each once."""
        ...

    def drain_cache_events(self) -> CacheEvents:
        """Return the changes of the prefix cache since the last call."""
        ...

    def load(self) -> Load:
        """Return the current load of the engine."""
        ...

    @property
    def integrity_faults(self) -> int:
        """Number of inconsistencies of pages, slots and prefix tree found so far."""
        ...

    def drain_integrity_faults(self) -> Sequence[str]:
        """Return descriptions of the first inconsistencies found since the last call."""
        ...

    @property
    def grammar_counts(self) -> GrammarCounts:
        """Counters of structured output since the engine started."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...

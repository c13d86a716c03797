# SPDX-License-Identifier: Apache-2.0
"""Protocol of the engine that the serving loop steps.

Implemented by `mizzen.engine.engine.Engine`, with a real or a simulated runner, and by fakes in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mizzen.common.model_task import ScoreActivation, Task
from mizzen.core.images.types import MissingImages
from mizzen.core.outputs import CacheEvents, ExpertUse, GrammarCounts, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.engine.images.pending import ImageFile
from mizzen.engine.images.statistics import ImageStatistics
from mizzen.images.types import ImageRules


class EngineInfoProtocol(Protocol):
    """Constant properties of a loaded engine, for gateways and metrics."""

    @property
    def context_length(self) -> int:
        """Maximum number of prompt and output tokens of a request; the KV cache has room for at least one
        request of this length."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids: valid ids are 0 to `vocab_size` - 1."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a request unless it ignores them."""
        ...

    @property
    def page_size(self) -> int:
        """Number of tokens per KV page."""
        ...

    @property
    def generates(self) -> bool:
        """Whether the model generates text; some models only compute embeddings or classify."""
        ...

    @property
    def task(self) -> Task:
        """Task of the model."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of a classifier's labels, by index; empty for other tasks."""
        ...

    @property
    def score_activation(self) -> ScoreActivation:
        """Default activation of a classifier's logits."""
        ...

    @property
    def pooling(self) -> str:
        """Pooling of the model: that of its files, or else the default of its architecture.

        Empty for the last token by default; may be the name of one that is not supported.
        """
        ...

    @property
    def images(self) -> bool:
        """Whether prompts may have images."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Device memory in bytes of rank 0's weights."""
        ...

    @property
    def quantization(self) -> str:
        """Description of quantized weights; empty for others."""
        ...

    @property
    def expert_groups(self) -> int:
        """Number of groups of ranks that hold different experts of a mixture; 0 for other models."""
        ...

    @property
    def format_bytes(self) -> Mapping[str, int]:
        """Device memory in bytes of rank 0's weights, by format."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Device memory in bytes of rank 0's KV cache."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Device memory in bytes of rank 0's captured CUDA graphs."""
        ...

    @property
    def other_bytes(self) -> int:
        """Memory in bytes of rank 0's device that is used by anything but weights, KV cache and graphs."""
        ...

    @property
    def step_bytes(self) -> int:
        """Device memory in bytes that was reserved for slots, steps and graphs when the KV cache was
        sized."""
        ...

    @property
    def device_bytes(self) -> int:
        """Total memory of rank 0's device in bytes."""
        ...

    @property
    def free_bytes(self) -> int:
        """Memory of rank 0's device that was free after loading, in bytes."""
        ...


class EngineProtocol(Protocol):
    """Engine that is called from one thread; callers choose small, dense request ids."""

    @property
    def info(self) -> EngineInfoProtocol:
        """Constant properties of the engine."""
        ...

    @property
    def busy(self) -> bool:
        """Whether requests are running or waiting, or were submitted or aborted since the last step."""
        ...

    def submit(self, request: Request) -> None:
        """Add a request, which the caller has validated, to the queue."""
        ...

    def abort(self, rid: int) -> None:
        """Abort a live request; `step` or `drain_finished` returns its `Finished` later."""
        ...

    @property
    def image_rules(self) -> ImageRules | None:
        """Rules of the model for images; None if it reads text only."""
        ...

    def provide_image(self, file: ImageFile) -> None:
        """Provide the file of an image that `drain_missing_images` named, if its request has not ended."""
        ...

    def drain_missing_images(self) -> Sequence[MissingImages]:
        """Return the images whose files live requests need, found since the last call."""
        ...

    def step(self, now: float) -> StepOutput | None:
        """Launch a step if possible; return the output of the oldest completed step, or None.

        An idle engine checks the consistency of its data structures instead.
        """
        ...

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return the requests that have finished outside a step since the last call."""
        ...

    def drain_cache_events(self) -> CacheEvents:
        """Return the changes of the prefix cache since the last call."""
        ...

    def load(self) -> Load:
        """Return the numbers of running and waiting requests and of used KV pages."""
        ...

    def expert_use(self, now: float) -> ExpertUse | None:
        """Return how tokens use the experts of a mixture, without waiting for the device.

        It is None if they are not counted. `now` is in monotonic seconds.
        """
        ...

    @property
    def integrity_faults(self) -> int:
        """Number of inconsistencies in pages, slots and prefix tree that were found so far."""
        ...

    def drain_integrity_faults(self) -> Sequence[str]:
        """Return descriptions of the first few inconsistencies that were found since the last call."""
        ...

    @property
    def grammar_counts(self) -> GrammarCounts:
        """Counters of compiled grammars and token masks since the engine started."""
        ...

    @property
    def image_statistics(self) -> ImageStatistics:
        """Statistics of images since the engine started."""
        ...

    def close(self) -> None:
        """Free the engine's device memory; the engine must not be used afterwards."""
        ...

"""What is fixed once an engine is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Sizes and identity of a loaded engine."""

    context_length: int
    """Prompt plus output tokens that a request may have; the KV cache holds that many."""
    vocab_size: int
    end_token_ids: tuple[int, ...]
    page_size: int
    pages_total: int
    weights_bytes: int
    kv_bytes: int
    dtype: str
    device: str
    generates: bool = True
    """False of models that have no head, and embed alone."""
    attention: tuple[str, str] = ("", "")
    """Backends of decodes and of prompts."""
    step_bytes: int = 0
    """Kept free for steps: slots, workspaces, graphs, intermediate results; those of graphs are estimated."""
    graph_bytes: int = 0
    """What captured graphs took, with the kernels that were loaded for them, as the device says."""
    device_bytes: int = 0
    """Memory of the device in all; on cpu of the machine, or of the container."""
    free_bytes: int = 0
    """What of it no process held once the engine was loaded."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds that each phase of start-up took: config, weights, kv, graphs (on cuda), warmup."""

    @property
    def other_bytes(self) -> int:
        """What is held beside weights, KV and graphs: steps, CUDA's own, other processes; on cpu a guess."""
        known = self.weights_bytes + self.kv_bytes + self.graph_bytes
        return max(0, self.device_bytes - self.free_bytes - known)

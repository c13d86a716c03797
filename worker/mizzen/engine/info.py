"""Facts about a loaded engine that do not change while it runs.

`mizzen.engine.loading.loader` fills them in; the server reports them to gateways and as metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Sizes and identity of a loaded engine."""

    context_length: int
    """Maximum number of prompt plus output tokens of a request; the KV cache holds that many."""
    vocab_size: int
    end_token_ids: tuple[int, ...]
    page_size: int
    pages_total: int
    weights_bytes: int
    kv_bytes: int
    dtype: str
    device: str
    generates: bool = True
    """False for embedding models without an LM head."""
    attention: tuple[str, str] = ("", "")
    """Names of the attention backends for decode and prefill."""
    step_bytes: int = 0
    """Bytes reserved for steps: slots, workspaces, graphs and activations; the graph part is an estimate."""
    graph_bytes: int = 0
    """Bytes that captured graphs and the kernels loaded for them took, as measured on the device."""
    device_bytes: int = 0
    """Total memory of the device in bytes; on CPU, of the machine or of the container."""
    free_bytes: int = 0
    """Bytes of device memory that no process used once the engine was loaded."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds that each start-up phase took: config, weights, kv, graphs (on CUDA), warmup."""

    @property
    def other_bytes(self) -> int:
        """Bytes in use besides weights, KV and graphs, such as the CUDA context; a guess on CPU."""
        accounted = self.weights_bytes + self.kv_bytes + self.graph_bytes
        return max(0, self.device_bytes - self.free_bytes - accounted)

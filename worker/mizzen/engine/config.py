"""Everything that the engine itself (without its process) can be told."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.options import check, option, required

ATTENTION_PREFILL = ("auto", "cpu", "fa3", "flashinfer", "flashinfer-fa3", "reference")
ALL_REDUCES = ("auto", "nccl", "one-shot", "two-shot", "push", "fused", "fused-two-shot")
EVICTIONS = ("lru", "lfu", "fifo", "mru", "slru", "priority")
ATTENTION_DECODE = (*ATTENTION_PREFILL, "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, precision, memory and scheduling. `LLM` takes each as a keyword."""

    model: str = required("Folder with config.json, the tokenizer and safetensors")
    device: str = option("cuda", "Where the model runs", choices=("cuda", "cpu"))
    dtype: str = option(
        "auto",
        "Precision of weights and KV; auto is the model's own on cuda and float32 on cpu",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = option(
        "safetensors", "dummy fills weights with seeded random values", choices=("safetensors", "dummy")
    )
    context_length: int | None = option(
        None, "Cap on prompt plus output tokens; the model's own by default", low=2
    )
    tensor: int = option(1, "Ranks (GPUs) that share the model", low=1)
    nodes: int = option(
        1, "Pods, or machines, that share the ranks: `mizzen engine` alone, with --node-rank", low=1
    )
    all_reduce: str = option(
        "auto",
        "How ranks on cuda add up what each computed; auto goes by size, from measurements",
        choices=ALL_REDUCES,
    )
    threads: int | None = option(None, "CPU threads of the model on cpu; all cores by default", low=1)

    mask_threads: int | None = option(
        None, "CPU threads for masks of structured output; by default up to 12, half of those left", low=1
    )
    max_running_requests: int = option(256, "Requests that decode together", low=1, high=4096)
    max_waiting_requests: int = option(2048, "Requests that may queue in the engine", low=1)
    memory_fraction: float = option(
        0.90, "Share of the device's memory that weights and KV may take", low=0.05, high=0.99
    )
    kv_cache_tokens: int | None = option(None, "KV capacity in tokens; from free memory by default", low=1)
    kv_cache_dtype: str = option(
        "auto",
        "KV precision: auto is the weights'; fp8 (e4m3) holds twice the tokens and is read faster; on cuda",
        choices=("auto", "fp8"),
    )
    prefill_chunk_tokens: int = option(8192, "Prompt tokens in one step at most", low=1)
    max_step_milliseconds: float = option(
        25.0, "While streams run, prompt work in a step is cut to fit this", low=1
    )
    page_size: int = option(16, "Tokens in a KV page", low=1, high=256)
    prefix_cache: str = option("radix", "Reuse the KV of common prefixes", choices=("radix", "none"))
    eviction: str = option("lru", "Which cached prefixes go first", choices=EVICTIONS)
    policy: str = option(
        "fcfs", "Which waiting request goes first", choices=("fcfs", "lpm", "dfs-weight", "priority")
    )
    attention_prefill: str = option("auto", "Attention backend of prompt chunks", choices=ATTENTION_PREFILL)
    attention_decode: str = option("auto", "Attention backend of decodes", choices=ATTENTION_DECODE)
    cuda_graph: str = option(
        "auto",
        "Replay captured graphs where the backend can, for decodes and for short steps with prompts",
        choices=("auto", "off"),
    )
    cuda_graph_max_batch: int = option(512, "Largest batch that graphs are captured for", low=1, high=4096)
    cuda_graph_max_tokens: int | None = option(
        None,
        "Largest step with prompts that graphs are captured for, in tokens (0: none); by default as many as "
        "run shorter than their launches take the host",
        low=0,
        high=65536,
    )
    fusion: str = option(
        "auto", "Run several plain operations as one kernel, on cuda", choices=("auto", "off")
    )
    steps_in_flight: int = option(2, "Steps launched before the first one's tokens are read", low=1, high=8)
    profile: str = option(
        "", "Folder for traces of steps, one at each SIGUSR2; steps are NVTX ranges, too. Empty: no profiling"
    )
    profile_steps: int = option(32, "Steps in a trace", low=1, high=10000)
    check_integrity: bool = option(False, "Check pages, slots and prefix tree whenever the engine is idle")

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        check(self)
        if self.tensor % self.nodes:
            raise ValueError(f"--tensor {self.tensor} must be a multiple of --nodes {self.nodes}")
        if self.nodes > 1 and self.all_reduce not in ("auto", "nccl"):
            raise ValueError(
                f"--all-reduce {self.all_reduce} works inside a machine alone: with --nodes {self.nodes} "
                "leave it at auto, or nccl"
            )

    @property
    def local_ranks(self) -> int:
        """Ranks of one node."""
        return self.tensor // self.nodes

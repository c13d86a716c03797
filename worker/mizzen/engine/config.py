"""Engine options, shared by `mizzen engine`, `mizzen serve` and `LLM`.

Each field describes and validates itself (`mizzen.common.options`); command lines are built from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import check, option, required

ATTENTION_PREFILL = ("auto", "cpu", "fa3", "flashinfer", "flashinfer-fa3", "reference")
ALL_REDUCES = ("auto", "nccl", "one-shot", "two-shot", "push", "fused", "fused-two-shot")
EVICTIONS = ("lru", "lfu", "fifo", "mru", "slru", "priority")
ATTENTION_DECODE = (*ATTENTION_PREFILL, "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, precision, memory and scheduling options. `LLM` accepts each field as a keyword argument."""

    model: str = required("Folder with config.json, the tokenizer and safetensors")
    device: str = option("cuda", "Device that the model runs on", choices=("cuda", "cpu"))
    dtype: str = option(
        "auto",
        "Precision of weights and KV cache; auto is the checkpoint's own on cuda and float32 on cpu",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = option(
        "safetensors",
        "Source of the weights; dummy fills them with seeded random values",
        choices=("safetensors", "dummy"),
    )
    context_length: int | None = option(
        None, "Maximum number of prompt plus output tokens; the model's own by default", low=2
    )
    tensor: int = option(1, "Tensor parallel size: ranks (GPUs) that share the model", low=1)
    nodes: int = option(
        1, "Pods or machines that share the ranks; only for `mizzen engine`, with --node-rank", low=1
    )
    all_reduce: str = option(
        "auto",
        "All-reduce algorithm of ranks on cuda; auto selects one by size, from measurements",
        choices=ALL_REDUCES,
    )
    threads: int | None = option(None, "CPU threads for the model on cpu; all cores by default", low=1)

    mask_threads: int | None = option(
        None,
        "CPU threads for structured output masks; by default half of the CPUs that the "
        "ranks leave free, 12 at most",
        low=1,
    )
    max_running_requests: int = option(
        256, "Maximum number of requests that decode together", low=1, high=4096
    )
    max_waiting_requests: int = option(2048, "Maximum number of requests queued in the engine", low=1)
    memory_fraction: float = option(
        0.90, "Fraction of the device's memory that weights and KV cache may use", low=0.05, high=0.99
    )
    kv_cache_tokens: int | None = option(
        None, "Capacity of the KV cache in tokens; derived from free memory by default", low=1
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache: auto is that of the weights; fp8 (e4m3, on cuda) "
        "holds twice as many tokens and is read faster",
        choices=("auto", "fp8"),
    )
    prefill_chunk_tokens: int = option(
        8192, "Maximum number of prompt tokens in one step (chunked prefill)", low=1
    )
    max_step_milliseconds: float = option(
        25.0,
        "While streams run, the prefill in a step is limited so that the step takes no longer than this",
        low=1,
    )
    page_size: int = option(16, "Tokens per KV page", low=1, high=256)
    prefix_cache: str = option(
        "radix", "Prefix cache that reuses the KV of common prefixes", choices=("radix", "none")
    )
    eviction: str = option("lru", "Eviction policy of the prefix cache", choices=EVICTIONS)
    policy: str = option(
        "fcfs",
        "Scheduling policy: order of the waiting requests",
        choices=("fcfs", "lpm", "dfs-weight", "priority"),
    )
    attention_prefill: str = option("auto", "Attention backend for prefill", choices=ATTENTION_PREFILL)
    attention_decode: str = option("auto", "Attention backend for decode", choices=ATTENTION_DECODE)
    cuda_graph: str = option(
        "auto",
        "Replay CUDA graphs, if the backend supports them, for decode steps and short steps with prefill",
        choices=("auto", "off"),
    )
    cuda_graph_max_batch: int = option(512, "Largest batch size to capture CUDA graphs for", low=1, high=4096)
    cuda_graph_max_tokens: int | None = option(
        None,
        "Largest step with prefill to capture CUDA graphs for, in tokens (0: none); by "
        "default the largest that runs in less time than the host needs to launch it",
        low=0,
        high=65536,
    )
    fusion: str = option(
        "auto", "Use fused kernels in place of several plain operations, on cuda", choices=("auto", "off")
    )
    steps_in_flight: int = option(
        2, "Steps launched before the tokens of the first one are read", low=1, high=8
    )
    profile: str = option(
        "",
        "Folder for step traces, one per SIGUSR2; steps are marked as NVTX ranges too. Empty: no profiling",
    )
    profile_steps: int = option(32, "Steps per trace", low=1, high=10000)
    check_integrity: bool = option(
        False, "Check the consistency of pages, slots and prefix tree whenever the engine is idle"
    )

    def __post_init__(self) -> None:
        """Validate every field.

        Raises:
            ValueError: A value is invalid; the message names the option and the allowed values.
        """
        check(self)
        if self.tensor % self.nodes:
            raise ValueError(f"--tensor {self.tensor} must be a multiple of --nodes {self.nodes}")
        if self.nodes > 1 and self.all_reduce not in ("auto", "nccl"):
            raise ValueError(
                f"--all-reduce {self.all_reduce} only works within one machine: with --nodes {self.nodes} "
                "use auto or nccl"
            )

    @property
    def local_ranks(self) -> int:
        """Number of ranks on one node."""
        return self.tensor // self.nodes

# SPDX-License-Identifier: Apache-2.0
"""Engine options, shared by `mizzen engine`, `mizzen serve` and `LLM`.

Each field declares its help text and its allowed values (see `mizzen.common.options`). The command-line
options are built from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import check, option, required

QUANTIZATIONS = ("auto", "fp8", "int8", "w4a16")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
ATTENTION_PREFILL = ("auto", "cpu", "fa3", "flashinfer", "flashinfer-fa3", "reference")
ALL_REDUCES = ("auto", "nccl", "one-shot", "two-shot", "push", "fused", "fused-two-shot")
EVICTIONS = ("lru", "lfu", "fifo", "mru", "slru", "priority")
ATTENTION_DECODE = (*ATTENTION_PREFILL, "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, precision, memory and scheduling options.

    `LLM` has a keyword argument for each field except `nodes`; a test compares them.
    """

    model: str = required("Folder with config.json, the tokenizer and safetensors")
    device: str = option("cuda", "Device that the model runs on", choices=("cuda", "cpu"))
    dtype: str = option(
        "auto",
        "Precision of weights and KV cache; auto is the checkpoint's precision on cuda, bfloat16 for "
        "quantized weights there, and float32 on cpu",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = option(
        "safetensors",
        "Source of the weights; dummy fills them with seeded random values",
        choices=("safetensors", "dummy"),
    )
    quantization: str = option(
        "auto",
        "Quantization of the weights while an unquantized checkpoint is loaded: fp8 (e4m3, with quantized "
        "activations), int8 or w4a16 (4-bit integers in groups of 128), by rounding to nearest; auto keeps "
        "the checkpoint's format",
        choices=QUANTIZATIONS,
    )
    model_implementation: str = option(
        "auto",
        "Code that computes the model: native is Mizzen's own, transformers is that of Transformers with "
        "Mizzen's attention; auto is native where Mizzen supports the architecture, else transformers",
        choices=MODEL_IMPLEMENTATIONS,
    )
    context_length: int | None = option(
        None, "Maximum number of prompt and output tokens together; by default the model's limit", low=2
    )
    tensor: int = option(1, "Tensor parallel size: number of ranks (GPUs) that share the model", low=1)
    expert: int | None = option(
        None,
        "Expert parallel size: number of groups of ranks that hold different experts of a mixture, a divisor "
        "of the tensor parallel size; the smallest possible one by default. The ranks of a group share the "
        "width of each expert",
        low=1,
    )
    nodes: int = option(
        1,
        "Number of pods or machines that share the ranks; works only in `mizzen engine`, with --node-rank",
        low=1,
    )
    all_reduce: str = option(
        "auto",
        "All-reduce algorithm of ranks on cuda; auto selects the fastest one for each message size",
        choices=ALL_REDUCES,
    )
    threads: int | None = option(
        None, "Number of CPU threads for the model on cpu; all cores by default", low=1
    )

    mask_threads: int | None = option(
        None,
        "Number of CPU threads for structured output masks; by default half of the CPUs that the "
        "ranks do not use, at most 12",
        low=1,
    )
    images: str = option(
        "auto",
        "Images in prompts: auto accepts them if the model supports them; off serves its text part alone",
        choices=("auto", "off"),
    )
    image_cache_tokens: int | None = option(
        None,
        "Number of embeddings of images that are kept on the device; by default enough for two images of "
        "the largest size, and for four times the largest number of prompt tokens in a step",
        low=1,
    )
    max_running_requests: int = option(
        256, "Maximum number of requests that decode together", low=1, high=4096
    )
    max_waiting_requests: int = option(2048, "Maximum number of requests queued in the engine", low=1)
    memory_fraction: float = option(
        0.90,
        "Fraction of the device's memory that weights, KV cache and the memory of a step may use",
        low=0.05,
        high=0.99,
    )
    kv_cache_tokens: int | None = option(
        None, "Capacity of the KV cache in tokens; derived from free memory by default", low=1
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache: auto is the precision of the weights; fp8 (e4m3, on cuda) "
        "fits twice as many tokens into the same memory and is read faster",
        choices=("auto", "fp8"),
    )
    prefill_chunk_tokens: int = option(
        8192, "Maximum number of prompt tokens in one step (chunked prefill)", low=1
    )
    max_step_milliseconds: float = option(
        25.0,
        "While streams run, a step gets only as much prefill and image encoding as fits into this time",
        low=1,
    )
    page_size: int = option(16, "Number of tokens per KV cache page", low=1, high=256)
    prefix_cache: str = option(
        "radix",
        "Prefix cache, which reuses the KV of common prefixes; none turns it off",
        choices=("radix", "none"),
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
        "Run decode steps and short steps with prefill as CUDA graphs, if the attention backend supports it",
        choices=("auto", "off"),
    )
    cuda_graph_max_batch: int = option(512, "Largest batch size to capture CUDA graphs for", low=1, high=4096)
    cuda_graph_max_tokens: int | None = option(
        None,
        "Largest step with prefill to capture CUDA graphs for, in tokens (0: none); by default "
        "the largest step that the GPU runs in less time than the host needs to launch it",
        low=0,
        high=65536,
    )
    fusion: str = option(
        "auto", "On cuda, use fused kernels instead of separate operations", choices=("auto", "off")
    )
    expert_load: str = option(
        "off",
        "Count the tokens of each expert of a mixture for a metric; off saves a few small kernels in each "
        "step",
        choices=("on", "off"),
    )
    steps_in_flight: int = option(
        2, "Number of steps that are launched before the tokens of the first one are read", low=1, high=8
    )
    profile: str = option(
        "",
        "Folder for step traces; each SIGUSR2 records one trace. Steps are also marked as NVTX ranges. "
        "Empty: no profiling",
    )
    profile_steps: int = option(32, "Number of steps per trace", low=1, high=10000)
    check_integrity: bool = option(
        False, "Check the consistency of pages, slots and prefix tree whenever the engine is idle"
    )

    def __post_init__(self) -> None:
        """Validate every field.

        Raises:
            ValueError: A value is invalid; the message names the option and the allowed values.
        """
        check(self)
        if self.expert is not None and self.tensor % self.expert:
            raise ValueError(f"--expert {self.expert} must divide --tensor {self.tensor}")
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

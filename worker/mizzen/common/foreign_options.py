# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's `vllm serve` and SGLang's launcher, and their counterparts in Mizzen.

The command line and `LLM` explain an unknown option with this table, and `scripts/option_table.py` writes it
into `docs/coming-from.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of vLLM or SGLang, and its counterpart."""

    vllm: tuple[str, ...] = ()
    """Names of the option in vLLM, the longest first."""
    sglang: tuple[str, ...] = ()
    """Names of the option in SGLang, the longest first."""
    options: tuple[str, ...] = ()
    """Options of `mizzen serve` to use instead, each with a placeholder of its value."""
    fields: tuple[str, ...] = ()
    """Fields of an InferenceService to use instead."""
    advice: str = ""
    """Sentence for users of the command line; by default only `options` are named."""
    remark: str = ""
    """Further facts for the documentation, such as a difference in meaning."""

    @property
    def instead(self) -> str:
        """Text that says what to write instead of the option on the command line."""
        return self.advice or " and ".join(self.options)


_EXTRA = "spec.engine.extraArgs"


class _Names(TypedDict):
    vllm: tuple[str, ...]
    sglang: tuple[str, ...]


def _both(*names: str) -> _Names:
    """Return the names of an option that is the same in vLLM and SGLang, as arguments of `ForeignOption`."""
    return {"vllm": names, "sglang": names}


FOREIGN_OPTIONS = (
    ForeignOption(
        vllm=("--model",),
        sglang=("--model-path", "--model"),
        fields=("spec.model.source",),
        advice="the model is an argument without an option: mizzen serve Qwen/Qwen3-0.6B",
    ),
    ForeignOption(
        **_both("--revision"),
        fields=("spec.model.source",),
        advice="write the revision after the model: mizzen serve hf://Qwen/Qwen3-0.6B@main",
    ),
    ForeignOption(
        vllm=("--hf-token",),
        fields=("spec.model.credentialsSecretRef",),
        advice="set the environment variable HF_TOKEN",
    ),
    ForeignOption(
        **_both("--download-dir"),
        fields=("spec.model.cache",),
        advice="set the environment variable MIZZEN_CACHE_DIR",
    ),
    ForeignOption(
        vllm=("--tokenizer",),
        sglang=("--tokenizer-path",),
        advice="the tokenizer is read from the model's folder",
    ),
    ForeignOption(
        **_both("--chat-template"), advice="put the template into the model's folder as chat_template.jinja"
    ),
    ForeignOption(
        **_both("--trust-remote-code"),
        advice="code from a model's folder is never run; use a model that docs/models.md lists",
    ),
    ForeignOption(
        **_both("--model-impl"),
        options=("--model-implementation NAME",),
        fields=("spec.model.implementation",),
    ),
    ForeignOption(
        **_both("--served-model-name"),
        options=("--served-name NAME",),
        fields=("spec.model.servedName", "spec.model.aliases"),
        remark="One name; vLLM accepts several. Further names are `--alias NAME`.",
    ),
    ForeignOption(
        vllm=("--max-model-len",),
        options=("--context-length N",),
        fields=("spec.model.contextLength",),
        remark="Prompt and output tokens together, as in vLLM. `auto` and units such as `32k` do not exist.",
    ),
    ForeignOption(
        vllm=("-q",),
        options=("--quantization NAME",),
        fields=("spec.engine.quantization",),
    ),
    ForeignOption(
        vllm=("--tensor-parallel-size", "-tp"),
        sglang=("--tensor-parallel-size", "--tp-size", "--tp"),
        options=("--tensor N",),
        fields=("spec.parallelism.tensor",),
    ),
    ForeignOption(
        vllm=("--pipeline-parallel-size", "-pp"),
        sglang=("--pipeline-parallel-size", "--pp-size", "--pp"),
        advice="pipeline parallelism is not supported; --tensor N spreads the model over N GPUs",
    ),
    ForeignOption(
        vllm=("--data-parallel-size", "-dp"),
        sglang=("--data-parallel-size", "--dp-size", "--dp"),
        fields=("spec.replicas",),
        advice="run several servers, or set spec.replicas of an InferenceService",
    ),
    ForeignOption(
        vllm=("--enable-expert-parallel", "-ep"),
        sglang=("--expert-parallel-size", "--ep-size", "--ep"),
        options=("--expert N",),
        fields=("spec.parallelism.expert",),
        remark="N divides `--tensor`; N groups of ranks hold different experts.",
    ),
    ForeignOption(
        **_both("--nnodes"),
        fields=("spec.accelerator.perPod",),
        advice="`mizzen engine` has --nodes N; an InferenceService has spec.accelerator.perPod",
    ),
    ForeignOption(
        vllm=("--gpu-memory-utilization",),
        sglang=("--mem-fraction-static",),
        options=("--memory-fraction X",),
        fields=("spec.engine.memoryFraction",),
        remark="A fraction of the GPU's whole memory. It covers weights, KV cache and the memory of a step, "
        "as in vLLM; in SGLang it does not cover activations.",
    ),
    ForeignOption(
        vllm=("--num-gpu-blocks-override",),
        sglang=("--max-total-tokens",),
        options=("--kv-cache-tokens N",),
        fields=(_EXTRA,),
        remark="In tokens; vLLM counts blocks.",
    ),
    ForeignOption(
        vllm=("--kv-cache-memory-bytes",),
        options=("--kv-cache-tokens N",),
        fields=(_EXTRA,),
        remark="In tokens; `mizzen inspect` prints the bytes of a token.",
    ),
    ForeignOption(
        vllm=("--block-size",),
        options=("--page-size N",),
        fields=("spec.engine.pageSize",),
    ),
    ForeignOption(
        vllm=("--max-num-seqs",),
        options=("--max-running-requests N",),
        fields=("spec.engine.maxRunningRequests",),
    ),
    ForeignOption(
        sglang=("--max-queued-requests",),
        options=("--max-waiting-requests N",),
        fields=(_EXTRA,),
        remark="Limits the queue of one engine. The gateway's queue is limited by `--queue-size`.",
    ),
    ForeignOption(
        vllm=("--max-num-batched-tokens",),
        sglang=("--max-prefill-tokens",),
        options=("--prefill-chunk-tokens N",),
        fields=("spec.engine.prefillChunkTokens",),
        remark="Counts only prompt tokens; vLLM's limit counts the tokens of decoding requests, too.",
    ),
    ForeignOption(
        vllm=("--enable-chunked-prefill",),
        sglang=("--chunked-prefill-size",),
        options=("--prefill-chunk-tokens N",),
        fields=("spec.engine.prefillChunkTokens",),
        advice="prompts are always prefilled in chunks; --prefill-chunk-tokens N sets their size",
    ),
    ForeignOption(
        vllm=("--enable-prefix-caching",),
        fields=("spec.engine.prefixCache",),
        advice="the prefix cache is on by default; --prefix-cache none turns it off",
    ),
    ForeignOption(
        vllm=("--no-enable-prefix-caching",),
        sglang=("--disable-radix-cache",),
        options=("--prefix-cache none",),
        fields=("spec.engine.prefixCache",),
    ),
    ForeignOption(
        sglang=("--radix-eviction-policy",),
        options=("--eviction NAME",),
        fields=(_EXTRA,),
    ),
    ForeignOption(
        vllm=("--scheduling-policy",),
        sglang=("--schedule-policy",),
        options=("--policy NAME",),
        fields=(_EXTRA,),
        remark="Values: fcfs, lpm, dfs-weight and priority. Larger priorities run first, unlike in vLLM.",
    ),
    ForeignOption(
        **_both("--attention-backend"),
        options=("--attention-prefill NAME", "--attention-decode NAME"),
        fields=("spec.engine.attention.prefill", "spec.engine.attention.decode"),
        remark="The default selects the backend for the GPU.",
    ),
    ForeignOption(
        vllm=("--enforce-eager",),
        sglang=("--disable-cuda-graph",),
        options=("--cuda-graph off",),
        fields=("spec.engine.cudaGraph.mode",),
    ),
    ForeignOption(
        vllm=("--compilation-config", "-O"),
        options=("--cuda-graph off",),
        fields=("spec.engine.cudaGraph.mode",),
        advice="models are not compiled; --cuda-graph off turns CUDA graphs off",
    ),
    ForeignOption(
        vllm=("--max-cudagraph-capture-size",),
        sglang=("--cuda-graph-max-bs",),
        options=("--cuda-graph-max-batch N",),
        fields=("spec.engine.cudaGraph.maxBatchSize",),
    ),
    ForeignOption(
        vllm=("--no-async-scheduling",),
        sglang=("--disable-overlap-schedule",),
        options=("--steps-in-flight 1",),
        fields=("spec.engine.overlapScheduling",),
    ),
    ForeignOption(vllm=("--seed",), sglang=("--random-seed",), advice="set the seed in each request"),
    ForeignOption(
        vllm=("--speculative-config", "--speculative-model"),
        sglang=("--speculative-algorithm",),
        advice="speculative decoding is not supported",
    ),
    ForeignOption(
        vllm=("--enable-lora", "--lora-modules"),
        sglang=("--enable-lora", "--lora-paths"),
        advice="LoRA adapters are not supported: merge the adapter into the checkpoint",
    ),
    ForeignOption(
        vllm=("--kv-transfer-config",),
        sglang=("--disaggregation-mode",),
        advice="prefill and decode on separate engines are not supported",
    ),
    ForeignOption(
        vllm=("--cpu-offload-gb",),
        sglang=("--cpu-offload-gb",),
        advice="weights stay in GPU memory; --tensor N spreads the model over N GPUs",
    ),
    ForeignOption(
        vllm=("--kv-offloading-size",),
        sglang=("--enable-hierarchical-cache",),
        advice="the KV cache is only in GPU memory",
    ),
    ForeignOption(
        vllm=("--structured-outputs-config", "--guided-decoding-backend"),
        sglang=("--grammar-backend",),
        advice="structured output always uses xgrammar, without an option",
    ),
    ForeignOption(
        vllm=("--tool-call-parser",),
        sglang=("--tool-call-parser",),
        options=("--tool-parser NAME",),
        fields=("spec.gateway.toolParser",),
        remark="By default detected from the chat template.",
    ),
    ForeignOption(
        vllm=("--enable-auto-tool-choice",),
        fields=("spec.gateway.toolParser",),
        advice="tool calls are always on; --tool-parser NAME selects their format",
    ),
    ForeignOption(
        vllm=("--runner", "--convert", "--task"),
        sglang=("--is-embedding",),
        advice="the kind of a model is read from its config.json",
    ),
    ForeignOption(
        **_both("--api-key"),
        fields=("spec.gateway.apiKeys",),
        options=("--api-keys-file FILE",),
        advice="--api-keys-file FILE (docs/tenants.md describes the file)",
        remark="Keys in a file have names, models, limits and priorities ([API keys](tenants.md#api-keys)).",
    ),
    ForeignOption(
        vllm=("--allowed-origins",),
        options=("--cors-origin URL",),
        fields=("spec.gateway.cors.allowOrigins",),
    ),
    ForeignOption(
        **_both("--ssl-certfile"),
        options=("--tls-cert FILE",),
        fields=("spec.gateway.tls.secretName",),
    ),
    ForeignOption(
        **_both("--ssl-keyfile"),
        options=("--tls-key FILE",),
        fields=("spec.gateway.tls.secretName",),
    ),
    ForeignOption(
        vllm=("--api-server-count", "-asc"),
        options=("--processes N",),
        fields=("spec.gateway.processes",),
    ),
    ForeignOption(
        sglang=("--enable-metrics",),
        advice="metrics are always on, at the ports --http-port and --admin-port",
    ),
    ForeignOption(
        **_both("--otlp-traces-endpoint"),
        options=("--otlp-endpoint URL",),
        fields=("spec.observability.tracing.otlpEndpoint",),
        remark="OTLP over HTTP.",
    ),
    ForeignOption(
        vllm=("--enable-log-requests", "--disable-log-requests"),
        sglang=("--log-requests",),
        fields=("spec.gateway.accessLog",),
        advice="`mizzen serve` logs no requests",
        remark="Gateways on a cluster write an [access log](tracing.md).",
    ),
)
"""Options that Mizzen does not have, in the order of the documentation."""
FOREIGN_BY_NAME = {name: entry for entry in FOREIGN_OPTIONS for name in (*entry.vllm, *entry.sglang)}
"""The entry of `FOREIGN_OPTIONS` for each name of an option."""

SAME_OPTIONS = (
    ForeignOption(
        **_both("--host"),
        options=("--host",),
        remark="127.0.0.1 by default, as in SGLang; vLLM listens everywhere.",
    ),
    ForeignOption(
        **_both("--port"),
        options=("--port",),
        fields=("spec.gateway.service.port",),
        remark="8000 by default, as in vLLM; 30000 in SGLang.",
    ),
    ForeignOption(
        **_both("--dtype"),
        options=("--dtype",),
        fields=("spec.model.dtype",),
        remark="auto, bfloat16, float16 or float32.",
    ),
    ForeignOption(
        **_both("--quantization"),
        options=("--quantization",),
        fields=("spec.engine.quantization",),
        remark="fp8, int8 or w4a16, which [quantize](quantization.md#quantize-while-loading) an unquantized "
        "checkpoint. The format of a quantized one, such as awq, is read from its files.",
    ),
    ForeignOption(
        **_both("--kv-cache-dtype"),
        options=("--kv-cache-dtype",),
        fields=("spec.engine.kvCacheDtype",),
        remark="auto or fp8; fp8 is e4m3.",
    ),
    ForeignOption(
        **_both("--load-format"),
        options=("--load-format",),
        fields=(_EXTRA,),
        remark="safetensors or dummy; other formats are not loaded.",
    ),
    ForeignOption(
        **_both("--reasoning-parser"),
        options=("--reasoning-parser",),
        fields=("spec.gateway.reasoningParser",),
        remark="By default detected from the chat template. The names of formats differ.",
    ),
    ForeignOption(
        sglang=("--context-length",), options=("--context-length",), fields=("spec.model.contextLength",)
    ),
    ForeignOption(
        sglang=("--page-size",),
        options=("--page-size",),
        fields=("spec.engine.pageSize",),
        remark="16 by default; 1 in SGLang.",
    ),
    ForeignOption(
        sglang=("--max-running-requests",),
        options=("--max-running-requests",),
        fields=("spec.engine.maxRunningRequests",),
    ),
    ForeignOption(
        sglang=("--device",),
        options=("--device",),
        fields=("spec.engine.device",),
        remark="auto, cuda or cpu. An InferenceService has CUDA or CPU.",
    ),
)
"""Options that Mizzen has under the same name, for the documentation."""

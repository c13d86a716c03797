"""Options of vLLM's `vllm serve` and SGLang's launcher, and what to write instead of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_PREFIX_CACHE = "the prefix cache is on by default; --prefix-cache none turns it off"
_CHUNKS = "prompts are always prefilled in chunks; --prefill-chunk-tokens N sets their size"
_GRAPHS = "--cuda-graph off"
_CONTEXT = "--context-length N"
_MEMORY = "--memory-fraction X"
_RUNNING = "--max-running-requests N"
_TENSOR = "--tensor N"
_MODEL = "the model is an argument without an option: mizzen serve Qwen/Qwen3-0.6B"
_NO_PIPELINE = "pipeline parallelism is not supported; --tensor N spreads the model over N GPUs"
_NO_DATA = "run several servers, or set spec.replicas of an InferenceService"
_NO_CODE = "code from a model's folder is never run; use a model that docs/models.md lists"
_NO_SPECULATION = "speculative decoding is not supported"
_NO_LORA = "LoRA adapters are not supported: merge the adapter into the checkpoint"
_QUANTIZATION = "quantized checkpoints are not served: use the original one, without this option"
_ALWAYS_METRICS = "metrics are always on, at the ports --http-port and --admin-port"

FOREIGN_OPTIONS = {
    "--allowed-origins": "--cors-origin URL",
    "--api-key": "--api-keys-file FILE (docs/tenants.md describes the file)",
    "--attention-backend": "--attention-prefill NAME and --attention-decode NAME",
    "--block-size": "--page-size N",
    "--chat-template": "put the template into the model's folder as chat_template.jinja",
    "--chunked-prefill-size": _CHUNKS,
    "--cuda-graph-max-bs": "--cuda-graph-max-batch N",
    "--data-parallel-size": _NO_DATA,
    "--disable-cuda-graph": _GRAPHS,
    "--disable-log-requests": "`mizzen serve` logs no requests",
    "--disable-overlap-schedule": "--steps-in-flight 1",
    "--disable-radix-cache": "--prefix-cache none",
    "--download-dir": "set the environment variable MIZZEN_CACHE_DIR",
    "--dp": _NO_DATA,
    "--dp-size": _NO_DATA,
    "--enable-auto-tool-choice": "tool calls are always on; --tool-parser NAME selects their format",
    "--enable-chunked-prefill": _CHUNKS,
    "--enable-lora": _NO_LORA,
    "--enable-metrics": _ALWAYS_METRICS,
    "--enable-prefix-caching": _PREFIX_CACHE,
    "--enforce-eager": _GRAPHS,
    "--gpu-memory-utilization": _MEMORY,
    "--hf-token": "set the environment variable HF_TOKEN",
    "--kv-cache-memory-bytes": "--kv-cache-tokens N",
    "--log-requests": "`mizzen serve` logs no requests",
    "--lora-modules": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--max-cudagraph-capture-size": "--cuda-graph-max-batch N",
    "--max-model-len": _CONTEXT,
    "--max-num-batched-tokens": "--prefill-chunk-tokens N",
    "--max-num-seqs": _RUNNING,
    "--max-prefill-tokens": "--prefill-chunk-tokens N",
    "--max-queued-requests": "--max-waiting-requests N",
    "--max-total-tokens": "--kv-cache-tokens N",
    "--mem-fraction-static": _MEMORY,
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--nnodes": "`mizzen engine` has --nodes N; an InferenceService has spec.accelerator.perPod",
    "--no-enable-prefix-caching": "--prefix-cache none",
    "--num-gpu-blocks-override": "--kv-cache-tokens N",
    "--pipeline-parallel-size": _NO_PIPELINE,
    "--pp": _NO_PIPELINE,
    "--pp-size": _NO_PIPELINE,
    "--quantization": _QUANTIZATION,
    "--radix-eviction-policy": "--eviction NAME",
    "--random-seed": "set the seed in each request",
    "--revision": "write the revision after the model: mizzen serve hf://Qwen/Qwen3-0.6B@main",
    "--schedule-policy": "--policy NAME",
    "--scheduling-policy": "--policy NAME",
    "--seed": "set the seed in each request",
    "--served-model-name": "--served-name NAME",
    "--speculative-algorithm": _NO_SPECULATION,
    "--speculative-config": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--ssl-certfile": "--tls-cert FILE",
    "--ssl-keyfile": "--tls-key FILE",
    "--tensor-parallel-size": _TENSOR,
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--tokenizer-path": "the tokenizer is read from the model's folder",
    "--tool-call-parser": "--tool-parser NAME",
    "--tp": _TENSOR,
    "--tp-size": _TENSOR,
    "--trust-remote-code": _NO_CODE,
    "-tp": _TENSOR,
    "-pp": _NO_PIPELINE,
    "-q": _QUANTIZATION,
    "-O": _GRAPHS,
}
"""Advice by option: the option to use instead, with its value, or a sentence."""


class ServeCommand(TyperCommand):
    """Command that recognizes the options of other servers and says what to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises:
            UsageError: an option is unknown; the message has the option to use instead, if there is one.
        """
        foreign = next((name for name in map(_option_name, args) if self._is_foreign(name, ctx)), None)
        if foreign is not None:
            ctx.fail(f"No such option: {foreign}. In Mizzen: {FOREIGN_OPTIONS[foreign]}")
        return super().parse_args(ctx, args)

    def _is_foreign(self, name: str, ctx: Any) -> bool:
        own = (option for parameter in self.get_params(ctx) for option in parameter.opts)
        return name in FOREIGN_OPTIONS and name not in own


def _option_name(word: str) -> str:
    """Return the name of an option without its value, such as `--tp` for `--tp=2`."""
    return word.partition("=")[0]

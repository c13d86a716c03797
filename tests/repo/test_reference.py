# SPDX-License-Identifier: Apache-2.0
"""The reference pages match the code, and processes accept the arguments that the operator gives them."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_table
import pytest
import reference
import typer.main
import yaml
from generated_pages import replace_part

from mizzen.cli import app
from mizzen.commands.options import settings
from mizzen.engine.config import MODEL_IMPLEMENTATIONS
from mizzen.gateway.config import VLLM_REASONING_PARSER, VLLM_TOOL_PARSER, GatewayConfig
from mizzen.models.registry import HEADLESS_READERS, READERS
from mizzen.models.text_part import TEXT_PARTS
from mizzen.server.config import EngineConfig
from mizzen_operator.api.gateway_sharing import resolve_sharing
from mizzen_operator.api.parse import parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources import engine_args, gateway_spec, group_member
from mizzen_operator.resources import gateway_deployment as gateway_render
from mizzen_operator.resources import shared_gateway as shared_render
from mizzen_operator.resources.gateway_deployment import gateway_arguments

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "catalog_schema",
    "catalog_table",
    "chart_reference",
    "compatibility",
    "model_table",
    "option_table",
    "python_reference",
    "reference",
    "sizing_tables",
)
PAGES = {
    page: (make, script) for script in SCRIPTS for page, make in importlib.import_module(script).PAGES.items()
}
VARIABLES = {"$(POD_NAME)": "pod-0", "$(POD_IP)": "127.97.0.2"}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_reference_pages_are_current(page: str) -> None:
    written, (make, script) = (ROOT / page).read_text(), PAGES[page]
    assert written == make(), f"{page} is out of date: run python scripts/{script}.py"


def test_a_generated_part_is_replaced_between_its_marks() -> None:
    text = "head\n<begin>\n\nold\n\n<end>\ntail\n<end>\n"
    assert replace_part(text, "<begin>", ["new"], "<end>") == text.replace("old", "new")
    assert replace_part(text, "<begin>", ["new", ""]) == "head\n<begin>\n\nnew\n"
    for marks in (("<start>", "<end>"), ("<begin>", "<stop>"), ("<start>", "")):
        with pytest.raises(ValueError, match="the page lacks the mark <st"):
            replace_part(text, marks[0], [], marks[1])


def test_all_pages_are_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries: Any) -> set[str]:
        if isinstance(entries, str):
            return {entries}
        values = entries.values() if isinstance(entries, dict) else entries
        return set().union(*(pages(entry) for entry in values))

    docs = ROOT / "docs"
    hidden = {line.strip("/") for line in site["not_in_nav"].split()}
    assert hidden == {"regressions.md"}  # for contributors only; docs/contributing.md leads there
    assert pages(site["nav"]) | hidden == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}


def command_line(arguments: list[str]) -> dict[str, Any]:
    """Parse a process's command line as `mizzen` does in a pod; return the values of its options by name."""
    for name, value in VARIABLES.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    group: Any = typer.main.get_command(app)
    name, rest = arguments[0], arguments[1:]
    with group.commands[name].make_context(name, list(rest)) as context:
        return {key: tuple(v) if isinstance(v, list) else v for key, v in context.params.items()}


def service(*, shared: bool = False, **engine: Any) -> InferenceService:
    """Return a service in which all fields that become options of processes differ from their defaults."""
    spec: dict[str, Any] = {
        "model": {
            "source": "file:///models/m",
            "servedName": "name",
            "aliases": ["a", "b"],
            "dtype": "BFloat16",
            "contextLength": 1000,
            "cache": {"mode": "None"},
        },
        "replicas": 2,
        "parallelism": {"tensor": 2},
        "accelerator": {"resourceName": "nvidia.com/gpu", "nodeSelector": {}},
        "engine": {
            "device": "CUDA",
            "maxRunningRequests": 7,
            "memoryFraction": "0.55",
            "prefillChunkTokens": 77,
            "maxStepMilliseconds": 9,
            "pageSize": 32,
            "prefixCache": "None",
            "attention": {"prefill": "Reference", "decode": "Split"},
            "quantization": "W4A16",
            "kvCacheDtype": "FP8",
            "overlapScheduling": "Disabled",
            "cudaGraph": {"mode": "Disabled", "maxBatchSize": 99},
            "extraArgs": ["--kv-cache-tokens=4096", "--check-integrity"],
            "env": [],
            **engine,
        },
        "podTemplate": {"imagePullSecrets": []},
        "gateway": {
            "mode": "Shared" if shared else "Dedicated",
            "replicas": 1,
            "service": {"type": "ClusterIP", "port": 8000, "annotations": {}},
            "apiKeys": {"secretNames": ["team-a", "team-b"], "fromLabel": False},
            "tls": {"secretName": "cert"},
            "cors": {"allowOrigins": ["https://a.example"]},
            "admission": {
                "maxInFlight": 11,
                "maxTokensInFlight": 12,
                "queueSize": 13,
                "queueTimeoutSeconds": 14,
            },
            "processes": 3,
            "resources": {},
            "routing": {"loadFactorPercent": 175, "warmupTokens": 64, "warmupTimeoutSeconds": 8},
            "retries": {
                "maxAttempts": 4,
                "streamResume": "Enabled",
                "maxResumes": 5,
                "resumeTimeoutSeconds": 6,
                "resumeWaitSeconds": 7,
            },
            "toolParser": "Qwen3Coder",
            "reasoningParser": "DeepSeekR1",
            "accessLog": "Prompts",
            "moderation": {"categories": {"S10": "hate", "spam": "illicit"}},
            "playground": "Enabled",
            "grpc": "Enabled",
            "images": {
                "urls": "Allowed",
                "allowHosts": ["cdn.example.com", "*.example.org"],
                "maxPerRequest": 4,
                "maxBytes": 65536,
                "maxPixels": 1000000,
            },
            "extraArgs": ["--max-body-bytes=4096"],
        },
        "lifecycle": {"startupTimeoutSeconds": 61, "drainTimeoutSeconds": 62, "maxGroupRestarts": 10},
        "rollout": {
            "maxSurge": 1,
            "maxUnavailable": 0,
            "partition": 0,
            "paused": False,
            "progressDeadlineSeconds": 600,
        },
        "availability": {"podDisruptionBudget": "Auto", "spreadTopologyKey": ""},
        "observability": {
            "tracing": {
                "otlpEndpoint": "http://collector:4318",
                "samplingPercent": 5,
                "headersSecretRef": {"name": "otlp", "key": "headers"},
            }
        },
        "revisionHistoryLimit": 5,
        "networkPolicy": "Disabled",
        "suspend": True,
    }
    meta = {"name": "s", "namespace": "n", "uid": "u", "generation": 1}
    return parse_service({"metadata": meta, "spec": spec})


def test_the_operators_engine_arguments_are_options_of_the_engine() -> None:
    config = EngineConfig(
        **command_line(
            engine_args.engine_arguments(service(), "r1", group_member.GroupMember("r1", 0, 0, "s-r1-0-0"))
        )
    )
    assert config == EngineConfig(
        model="/models/m",
        served_name="name",
        device="cuda",
        dtype="bfloat16",
        context_length=1000,
        tensor=2,
        max_running_requests=7,
        memory_fraction=0.55,
        prefill_chunk_tokens=77,
        max_step_milliseconds=9,
        page_size=32,
        prefix_cache="none",
        attention_prefill="reference",
        attention_decode="split",
        quantization="w4a16",
        kv_cache_dtype="fp8",
        steps_in_flight=1,
        cuda_graph="off",
        cuda_graph_max_batch=99,
        kv_cache_tokens=4096,
        check_integrity=True,
        revision="r1",
        engine_id="pod-0",
        wire_bind="tcp://127.97.0.2:5557",
        keys="/var/run/mizzen/keys",
        http_host="127.97.0.2",
        http_port=8081,
        startup_timeout_seconds=61,
        drain_timeout_seconds=62,
    )


COMMON: dict[str, Any] = {
    "namespace": "n",
    "host": "127.97.0.2",
    "port": 8000,
    "admin_host": "127.97.0.2",
    "admin_port": 8001,
    "admin_token_file": "/var/run/mizzen/keys/admin.token",
    "keys": "/var/run/mizzen/keys",
    "api_keys_file": ("/var/run/mizzen/api-keys/team-a", "/var/run/mizzen/api-keys/team-b"),
    "cors_origin": ("https://a.example",),
    "tls_cert": "/var/run/mizzen/tls/tls.crt",
    "tls_key": "/var/run/mizzen/tls/tls.key",
    "max_in_flight": 11,
    "max_tokens_in_flight": 12,
    "queue_size": 13,
    "queue_timeout_seconds": 14.0,
    "drain_timeout_seconds": 62,
    "processes": 3,
    "load_factor_percent": 175,
    "warm_tokens": 64,
    "warm_seconds": 8.0,
    "max_attempts": 4,
    "max_resumes": 5,
    "resume_timeout_seconds": 6.0,
    "resume_wait_seconds": 7.0,
    "tool_parser": "qwen3-coder",
    "reasoning_parser": "deepseek-r1",
    "access_log": "prompts",
    "moderation_category": ("S10=hate", "spam=illicit"),
    "playground": True,
    "grpc_port": 9000,
    "max_images": 4,
    "max_image_bytes": 65536,
    "max_image_pixels": 1000000,
    "image_urls": "allowed",
    "image_hosts": ("cdn.example.com", "*.example.org"),
    "otlp_endpoint": "http://collector:4318",
    "otlp_headers_file": "/var/run/mizzen/otlp/headers",
    "max_body_bytes": 4096,
}


def test_the_operators_gateway_arguments_are_options_of_the_gateway() -> None:
    config = GatewayConfig(**command_line(gateway_arguments(gateway_spec.dedicated_gateway_spec(service()))))
    assert config == GatewayConfig(
        served_name="name", alias=("a", "b"), service="s", suspended=True, **COMMON
    )


def test_the_arguments_of_a_shared_gateway_are_options_of_the_gateway() -> None:
    sharing = resolve_sharing([service(shared=True)])
    assert sharing is not None
    config = GatewayConfig(**command_line(gateway_arguments(shared_render.shared_gateway_spec(sharing))))
    assert config == GatewayConfig(services_config_map="mizzen-shared", **COMMON)


@functools.cache
def crd_fields() -> dict[str, dict[str, Any]]:
    return reference.crd_fields("spec")


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("spec.model.dtype", "dtype"),
        ("spec.engine.device", "device"),
        ("spec.engine.prefixCache", "prefix_cache"),
        ("spec.engine.attention.prefill", "attention_prefill"),
        ("spec.engine.attention.decode", "attention_decode"),
        ("spec.engine.maxRunningRequests", "max_running_requests"),
        ("spec.engine.memoryFraction", "memory_fraction"),
        ("spec.engine.prefillChunkTokens", "prefill_chunk_tokens"),
        ("spec.engine.maxStepMilliseconds", "max_step_milliseconds"),
        ("spec.engine.pageSize", "page_size"),
        ("spec.engine.quantization", "quantization"),
        ("spec.engine.kvCacheDtype", "kv_cache_dtype"),
        ("spec.engine.cudaGraph.maxBatchSize", "cuda_graph_max_batch"),
        ("spec.gateway.processes", "processes"),
        ("spec.gateway.images.urls", "image_urls"),
        ("spec.gateway.images.maxPerRequest", "max_images"),
        ("spec.gateway.images.maxBytes", "max_image_bytes"),
        ("spec.gateway.images.maxPixels", "max_image_pixels"),
        ("spec.gateway.routing.loadFactorPercent", "load_factor_percent"),
        ("spec.gateway.retries.maxAttempts", "max_attempts"),
        ("spec.gateway.retries.maxResumes", "max_resumes"),
        ("spec.gateway.retries.resumeTimeoutSeconds", "resume_timeout_seconds"),
        ("spec.gateway.retries.resumeWaitSeconds", "resume_wait_seconds"),
        ("spec.lifecycle.startupTimeoutSeconds", "startup_timeout_seconds"),
        ("spec.lifecycle.drainTimeoutSeconds", "drain_timeout_seconds"),
        ("spec.gateway.admission.maxInFlight", "max_in_flight"),
        ("spec.gateway.admission.maxTokensInFlight", "max_tokens_in_flight"),
        ("spec.gateway.admission.queueSize", "queue_size"),
        ("spec.gateway.admission.queueTimeoutSeconds", "queue_timeout_seconds"),
    ],
)
def test_the_crd_allows_only_values_that_the_processes_accept(field: str, option: str) -> None:
    schema = crd_fields()[field]
    shared_fields = [*settings(EngineConfig), *settings(GatewayConfig)]
    setting = next(setting for setting in shared_fields if setting.name == option)
    for value in schema.get("enum", ()):
        assert value.lower() in {choice.replace("-", "") for choice in setting.choices}
    # An API server rounds such bounds in its messages, so the engine rejects the values between the bounds.
    rounded = (
        field == "spec.engine.memoryFraction" and schema["exclusiveMinimum"] and schema["exclusiveMaximum"]
    )
    if setting.choices == () and "minimum" in schema and not rounded:
        assert setting.low is None or schema["minimum"] >= setting.low
        assert setting.high is None or schema["maximum"] <= setting.high
    if "default" in schema:
        assert type(setting.default)(str(schema["default"]).lower()) == setting.default
    else:
        assert f"Defaults to {str(setting.default).capitalize()}, " in schema["description"]


def test_enumerations_of_the_crd_equal_the_gateways_choices() -> None:
    choices = {setting.name: set(setting.choices) for setting in settings(GatewayConfig)}
    for field, option, table in (
        ("toolParser", "tool_parser", gateway_render.TOOL_PARSERS),
        ("reasoningParser", "reasoning_parser", gateway_render.REASONING_PARSERS),
        ("accessLog", "access_log", gateway_render.ACCESS_LOG),
    ):
        assert set(crd_fields()[f"spec.gateway.{field}"]["enum"]) == set(table)
        assert set(table.values()) == choices[option] - {VLLM_TOOL_PARSER, VLLM_REASONING_PARSER}


def test_the_crd_reserves_exactly_the_gateway_options_that_the_operator_sets() -> None:
    rule = crd_fields()["spec.gateway.extraArgs"]["x-kubernetes-validations"][0]["rule"]
    reserved = set(re.search(r"\^--\(([a-z|-]+)\)", rule)[1].split("|"))  # type: ignore[index]
    sharing = resolve_sharing([service(shared=True)])
    assert sharing is not None
    fronts = gateway_spec.dedicated_gateway_spec(service()), shared_render.shared_gateway_spec(sharing)
    rendered = {a[2:] for front in fronts for a in gateway_arguments(front) if a.startswith("--")}
    never = {"engine", "services-file", "wake-timeout-seconds"}
    assert reserved == (rendered - {"max-body-bytes=4096"}) | never


def test_the_crd_reserves_exactly_the_engine_options_that_the_operator_sets() -> None:
    rule = crd_fields()["spec.engine.extraArgs"]["x-kubernetes-validations"][0]["rule"]
    reserved = set(re.search(r"\^--\(([a-z|-]+)\)", rule)[1].split("|"))  # type: ignore[index]
    worker = group_member.GroupMember("r1", 0, 0, "s-r1-0-0", rank=1)
    plain = service(extraArgs=[])
    full = replace(plain, pods=2, expert=1, model=replace(plain.model, implementation="Native"))
    rendered = engine_args.engine_arguments(full, "r1", worker)
    assert reserved == {argument[2:] for argument in rendered if argument.startswith("--")}


def test_the_crd_offers_every_implementation_of_models() -> None:
    offered = {value.lower() for value in crd_fields()["spec.model.implementation"]["enum"]}
    assert offered == set(MODEL_IMPLEMENTATIONS)


def test_the_guide_names_the_models_that_are_served() -> None:
    section = (ROOT / "docs/models.md").read_text().split("## Supported architectures")[1].split("\n## ")[0]
    others = {name for group in model_table.TRANSFORMERS_GROUPS for name in group.architectures}
    assert set(re.findall(r"`(\w+ForCausalLM)`", section)) | others == set(READERS) | others
    assert others <= set(re.findall(r"`(\w+)`", section))
    without_head = {name.replace("ForCausalLM", "Model") for name in READERS}
    assert set(re.findall(r"`(\w+ForConditionalGeneration)`", section)) == set(TEXT_PARTS)
    assert set(re.findall(r"`(\w+Model)`", section)) - others <= without_head == set(HEADLESS_READERS)

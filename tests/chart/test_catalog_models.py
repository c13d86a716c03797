# SPDX-License-Identifier: Apache-2.0
"""Every entry of the catalog is served by Mizzen and fits on its GPUs, and the API server accepts it.

`catalog_models.json` has the fields of config.json that matter here, of models that are not in
`known_models.json`, and the numbers of parameters, which agree with the sizes that the publishers state. The
factors of longrope, which change no size, are replaced by 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from chart_manifests import ROOT
from mizzen.cli import app
from mizzen.inspection.gpus import GIB, GPUS, gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.memory import format_count
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields
from mizzen.server.config import EngineConfig
from mizzen_local.kubectl import Kubectl
from mizzen_operator.api.accelerator_profiles import Profiles, apply_profile, parse_profiles
from mizzen_operator.api.gpu_memory_check import check_gpu_memory
from mizzen_operator.api.parse import parse_service
from mizzen_operator.resources.engine_args import engine_arguments
from mizzen_operator.resources.group_member import GroupMember
from snippets import list_snippets

OWN: dict[str, Any] = json.loads((Path(__file__).parent / "catalog_models.json").read_text())
KNOWN: dict[str, Any] = json.loads((ROOT / "tests/inspection/known_models.json").read_text())
CATALOG: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "charts/mizzen-models/values.yaml").read_text())[
    "catalog"
]
Services = dict[str, dict[str, Any]]


def model_files(entry: dict[str, Any]) -> ModelFiles:
    """Return the files of an entry's model: config.json only."""
    name = entry["spec"]["model"]["source"].removeprefix("hf://")
    return ModelFiles(name=name, fields=Fields((KNOWN | OWN)[name]["config"]))


def inspect(entry: dict[str, Any], tensor: int, **options: Any) -> Inspection:
    """Inspect the model of an entry on the GPUs that the entry names."""
    config = EngineConfig(model="m", **options)
    gpu = entry["accelerator"]
    return inspect_model(model_files(entry), config, tensors=(tensor,), gpu=gpu, memory=gpu_bytes(gpu))


def test_the_configurations_belong_to_models_in_the_catalog() -> None:
    sources = {entry["spec"]["model"]["source"].removeprefix("hf://") for entry in CATALOG.values()}
    assert set(OWN) <= sources <= set(KNOWN | OWN)
    assert not set(OWN) & set(KNOWN)


@pytest.mark.parametrize("name", OWN)
def test_a_model_has_the_stated_number_of_parameters(name: str) -> None:
    result = inspect_model(ModelFiles(name=name, fields=Fields(OWN[name]["config"])), EngineConfig(model="m"))
    assert result.parameters == OWN[name]["expect"]["parameters"]
    assert result.implementation == OWN[name]["expect"]["implementation"]


@pytest.mark.parametrize("name", CATALOG)
def test_an_entry_is_served_and_two_full_requests_fit(name: str) -> None:
    entry = CATALOG[name]
    spec = entry["spec"]
    assert set(spec) <= {"model", "parallelism"}  # all else that decides about memory has its default
    context = spec["model"].get("contextLength")
    result = inspect(entry, spec.get("parallelism", {}).get("tensor", 1), context_length=context)
    assert (result.served, result.estimated, result.generates) == (True, False, True), result.reason
    [size], [fit] = result.tensor_sizes, result.memory_fits
    assert size.possible, size.reason
    assert (result.dtype, fit.fits) == ("bfloat16", True), fit.message
    assert fit.kv_tokens >= 2 * (context or result.context_length)
    assert context is None or context < result.context_length
    assert spec["model"]["parameters"] == format_count(result.parameters)
    disk = int(entry["disk"].removesuffix("Gi")) * GIB
    assert 1.05 * result.weight_bytes + GIB < disk < 1.5 * result.weight_bytes + 10 * GIB


@pytest.mark.parametrize(
    "name", [name for name in CATALOG if "contextLength" in CATALOG[name]["spec"]["model"]]
)
def test_a_context_is_limited_only_where_the_memory_requires_it(name: str) -> None:
    entry = CATALOG[name]
    tensor = entry["spec"].get("parallelism", {}).get("tensor", 1)
    [fit] = inspect(entry, tensor).memory_fits
    assert entry["spec"]["model"]["contextLength"] > 0.5 * fit.kv_tokens / 2


def documented_profiles() -> Profiles:
    """Return the accelerator profiles of the example in docs/gpus.md."""
    [example] = [
        yaml.safe_load(snippet.text)["acceleratorProfiles"]
        for snippet in list_snippets(ROOT / "docs/gpus.md")
        if "acceleratorProfiles" in snippet.text
    ]
    return parse_profiles(json.dumps(example))


def run_command_line(arguments: list[str]) -> EngineConfig:
    """Return the configuration of an engine that is started with these arguments."""
    group: Any = get_command(app)
    with group.commands["engine"].make_context("engine", arguments[1:]) as context:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in context.params.items()
        }
    return EngineConfig(**values)


@pytest.mark.cluster
@pytest.mark.xdist_group("chart")
@pytest.mark.usefixtures("crd")
def test_the_api_server_accepts_all_entries_and_their_engines_fit(
    catalog_services: Services, kubectl: Kubectl, make_namespace: Callable[[str], str]
) -> None:
    make_namespace("harbour")
    manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(catalog_services.values())})
    command = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
    stored = json.loads(kubectl(*command, stdin=manifests))["items"]
    assert {service["metadata"]["name"] for service in stored} == set(CATALOG)
    profiles = documented_profiles()
    for body in stored:
        name = body["metadata"]["name"]
        gpu = CATALOG[name]["accelerator"]
        service = apply_profile(parse_service(body), profiles)
        assert service.profile == gpu and service.gpu_memory == f"{int(GPUS[gpu])}Gi"
        check = check_gpu_memory(service)
        assert check is not None and check.fits, check
        arguments = engine_arguments(service, "r1", GroupMember("r1", 0, 0, "s-r1-0-0"))
        config = run_command_line([item.replace("$(POD_IP)", "127.0.0.1") for item in arguments])
        [fit] = inspect_model(
            model_files(CATALOG[name]), config, tensors=(config.tensor,), gpu=gpu, memory=gpu_bytes(gpu)
        ).memory_fits
        assert fit.fits, fit.message
        expected = inspect(CATALOG[name], config.tensor, context_length=config.context_length)
        assert [fit] == list(expected.memory_fits)

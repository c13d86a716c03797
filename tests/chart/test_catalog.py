# SPDX-License-Identifier: Apache-2.0
"""The chart of the catalog: entries, overrides, values that are rejected, and notes; without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import mizzen
from chart_manifests import ROOT, of

CHART = ROOT / "charts/mizzen-models"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CATALOG: dict[str, dict[str, Any]] = VALUES["catalog"]
ON = {"enabled": True}
Services = dict[str, dict[str, Any]]


def render(catalog: Any, name: str, entry: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """Return the spec of an entry that is enabled, with overrides of the entry and other values."""
    [service] = catalog.template({"catalog": {name: {**ON, **(entry or {})}}, **values})
    assert (service["kind"], service["metadata"]["name"]) == ("InferenceService", name)
    return service["spec"]


def test_nothing_is_enabled_by_default(catalog: Any) -> None:
    assert not any(entry["enabled"] for entry in CATALOG.values())
    assert catalog.template() == []


def test_each_entry_renders_alone_as_together_with_all_others(
    catalog: Any, catalog_services: Services
) -> None:
    assert set(catalog_services) == set(CATALOG)
    assert len(CATALOG) >= 25
    for name in CATALOG:
        assert catalog.template(None, "--set", f"catalog.{name}.enabled=true") == [catalog_services[name]]


def test_entries_are_named_after_their_models_and_gpus() -> None:
    services = [(entry["spec"]["model"]["servedName"], entry["accelerator"]) for entry in CATALOG.values()]
    assert len(set(services)) == len(services)
    for name, (served, gpu) in zip(CATALOG, services, strict=True):
        assert name == f"{served.replace('.', '-')}-{gpu}"
        assert re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name)


def test_the_entries_of_a_model_agree_on_everything_but_the_gpus() -> None:
    models: dict[str, Any] = {}
    for entry in CATALOG.values():
        model = {key: value for key, value in entry["spec"]["model"].items() if key != "contextLength"}
        common = (model, entry["disk"], entry.get("token"))
        assert models.setdefault(model["source"], common) == common
        assert model["aliases"] == [model["source"].removeprefix("hf://")]


def test_the_catalog_uses_each_kind_of_gpu() -> None:
    assert {entry["accelerator"] for entry in CATALOG.values()} == set(VALUES["accelerators"])


def test_an_entry_has_a_claim_of_its_own(catalog_services: Services) -> None:
    caches = {name: service["spec"]["model"]["cache"] for name, service in catalog_services.items()}
    assert caches == {
        name: {"mode": "PersistentVolumeClaim", "claimName": f"{name}-weights", "size": entry["disk"]}
        for name, entry in CATALOG.items()
    }


def test_only_entries_that_need_a_token_refer_to_the_secret(catalog_services: Services) -> None:
    for name, service in catalog_services.items():
        token = {"name": "hub-token", "key": "token"} if CATALOG[name].get("token") else None
        assert service["spec"]["model"].get("credentialsSecretRef") == token
    owners = {entry["spec"]["model"]["source"].split("/")[2] for entry in CATALOG.values()}
    assert {"meta-llama", "google"} <= owners
    for entry in CATALOG.values():
        owner = entry["spec"]["model"]["source"].split("/")[2]
        assert owner not in ("meta-llama", "google") or entry["token"]


def test_the_requests_of_a_pod_follow_its_number_of_gpus(catalog: Any) -> None:
    def requests(tensor: int, **spec: Any) -> Any:
        entry = {"spec": {"parallelism": {"tensor": tensor}, **spec}}
        return render(catalog, "qwen3-8b-h100", entry)["podTemplate"]["resources"]

    assert requests(1) == {"requests": {"cpu": "2", "memory": "8Gi"}}
    assert requests(4) == {"requests": {"cpu": "5", "memory": "32Gi"}}
    assert requests(4, accelerator={"perPod": 2}) == {"requests": {"cpu": "3", "memory": "16Gi"}}
    own = {"limits": {"memory": "64Gi"}}
    assert requests(1, podTemplate={"resources": own}) == own


def test_the_spec_of_an_entry_overwrites_defaults(catalog: Any) -> None:
    defaults = {"replicas": 3, "gateway": {"replicas": 3, "playground": "Enabled"}, "suspend": True}
    entry = {"replicas": 0, "gateway": {"replicas": 1}, "suspend": False, "model": {"contextLength": 8192}}
    spec = render(catalog, "qwen3-8b-h100", {"spec": entry}, defaults=defaults)
    assert (spec["replicas"], spec["suspend"]) == (0, False)
    assert spec["gateway"] == {"replicas": 1, "playground": "Enabled"}
    assert spec["model"]["contextLength"] == 8192
    assert spec["model"]["source"] == "hf://Qwen/Qwen3-8B"
    assert render(catalog, "qwen3-8b-h100", defaults=defaults)["replicas"] == 3


def test_a_revision_can_be_pinned(catalog: Any) -> None:
    source = f"hf://Qwen/Qwen3-8B@{'0' * 40}"
    model = render(catalog, "qwen3-8b-h100", {"spec": {"model": {"source": source}}})["model"]
    assert (model["source"], model["servedName"]) == (source, "qwen3-8b")


def test_entries_can_share_a_claim(catalog: Any) -> None:
    cache = {"claimName": "weights", "accessMode": "ReadWriteMany"}
    for name in ("qwen3-8b-h100", "phi-4-h100"):
        given = render(catalog, name, defaults={"model": {"cache": cache}})["model"]["cache"]
        assert given == {"mode": "PersistentVolumeClaim", **cache}


def test_a_folder_of_the_nodes_can_be_the_cache(catalog: Any) -> None:
    cache = {"mode": "HostPath", "path": "/models"}
    assert render(catalog, "qwen3-8b-h100", defaults={"model": {"cache": cache}})["model"]["cache"] == cache


def test_weights_in_a_claim_need_neither_cache_nor_token(catalog: Any) -> None:
    entry = {"spec": {"model": {"source": "pvc://weights/gemma"}}}
    endpoint = {"model": {"endpoint": "https://hub.example.com"}}
    model = render(catalog, "gemma-3-27b-h100", entry, defaults=endpoint)["model"]
    assert model["source"] == "pvc://weights/gemma"
    assert not {"cache", "credentialsSecretRef", "endpoint"} & set(model)
    bucket = {"spec": {"model": {"source": "s3://models/gemma"}}}
    model = render(catalog, "gemma-3-27b-h100", bucket)["model"]
    assert model["cache"]["claimName"] == "gemma-3-27b-h100-weights"
    assert "credentialsSecretRef" not in model  # the token of the hub is not for the bucket


def test_the_secret_of_the_token_can_be_chosen(catalog: Any) -> None:
    secret = {"name": "my-secret", "key": "hub"}
    chosen = render(catalog, "llama-3-1-8b-h100", hubToken=secret)["model"]["credentialsSecretRef"]
    assert chosen == secret
    own = {"spec": {"model": {"credentialsSecretRef": {"name": "other", "key": "token"}}}}
    chosen = render(catalog, "llama-3-1-8b-h100", own, hubToken=secret)["model"]["credentialsSecretRef"]
    assert chosen == {"name": "other", "key": "token"}


def test_a_kind_of_gpu_needs_no_profile(catalog: Any) -> None:
    taint = {"key": "pool", "value": "inference", "effect": "NoSchedule"}
    gpu = {
        "profile": None,
        "resourceName": "nvidia.com/gpu",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"},
        "memory": "79Gi",
    }
    pod = {"tolerations": [taint], "runtimeClassName": "nvidia"}
    spec = render(catalog, "qwen3-8b-h100", accelerators={"h100": {**gpu, **pod}})
    assert spec["accelerator"] == {key: value for key, value in gpu.items() if value}
    assert {key: spec["podTemplate"][key] for key in pod} == pod
    bare = render(catalog, "qwen3-8b-h100", accelerators={"h100": {"profile": None}})
    assert bare["accelerator"] == {}
    assert bare["podTemplate"]["tolerations"] == VALUES["defaults"]["podTemplate"]["tolerations"]


def test_an_entry_of_ones_own(catalog: Any) -> None:
    entry = {
        "accelerator": "b200",
        "disk": "30Gi",
        "spec": {"model": {"source": "hf://acme/chat@v1"}, "parallelism": {"tensor": 2}},
    }
    spec = render(catalog, "acme-chat", entry, accelerators={"b200": {"profile": "b200"}})
    assert spec["accelerator"] == {"profile": "b200"}
    assert spec["model"]["cache"]["size"] == "30Gi"
    assert spec["podTemplate"]["resources"]["requests"]["cpu"] == "3"
    local = {"spec": {"model": {"source": "file:///opt/m"}, "engine": {"device": "CPU"}}}
    spec = render(catalog, "tiny", local)
    assert (spec["model"], spec["engine"]) == ({"source": "file:///opt/m"}, {"device": "CPU"})
    assert "accelerator" not in spec and "resources" not in spec["podTemplate"]


def test_an_entry_of_ones_own_needs_the_size_of_its_claim(catalog: Any) -> None:
    entry: dict[str, Any] = {"spec": {"model": {"source": "hf://acme/chat"}}}
    with pytest.raises(Exception, match=r"catalog\.acme-chat\.disk: set the size of the claim"):
        render(catalog, "acme-chat", entry)
    existing = {"cache": {"claimName": "mine"}}
    model = render(catalog, "acme-chat", entry, defaults={"model": existing})["model"]
    assert model["cache"] == {"mode": "PersistentVolumeClaim", "claimName": "mine"}


def test_labels_and_annotations(catalog: Any) -> None:
    values = {
        "catalog": {"phi-4-h100": ON},
        "commonLabels": {"team": "llm", "app.kubernetes.io/name": "not-this"},
        "commonAnnotations": {"owner": "me"},
    }
    meta = of(catalog.template(values), "InferenceService")["metadata"]
    assert meta["namespace"] == "harbour"
    assert meta["annotations"] == {"owner": "me"}
    assert meta["labels"] == {
        "team": "llm",
        "app.kubernetes.io/name": "phi-4-h100",
        "app.kubernetes.io/instance": "sail",
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": f"mizzen-models-{mizzen.__version__}",
    }


def test_a_misspelt_name_is_answered_with_all_names(catalog: Any) -> None:
    message = r"catalog\.qwen3-8b: the catalog has no entry of this name"
    with pytest.raises(Exception, match=message) as refusal:
        catalog.template({"catalog": {"qwen3-8b": ON}})
    assert str(refusal.value).count(", ".join(sorted(CATALOG))) == 1
    assert "qwen3-8b," not in str(refusal.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable": True}, "at '/catalog/phi-4-h100': additional properties 'enable' not allowed"),
    ({"enabled": "yes"}, "at '/catalog/phi-4-h100/enabled': got string, want boolean"),
    ({"disk": "much"}, "at '/catalog/phi-4-h100/disk'"),
    ({"spec": {"replica": 2}}, "additional properties 'replica' not allowed"),
    ({"spec": {"replicas": -1}}, "at '/catalog/phi-4-h100/spec/replicas': minimum: got -1, want 0"),
    ({"spec": {"parallelism": {"tensor": "two"}}}, "spec/parallelism/tensor': got string, want integer"),
    ({"spec": {"engine": {"kvCacheDtype": "fp8"}}}, "value must be one of 'Auto', 'FP8'"),
    ({"spec": {"engine": {"memoryFraction": 1}}}, "spec/engine/memoryFraction': exclusiveMaximum"),
    ({"spec": {"podTemplate": {"tolerations": [{"keys": "a"}]}}}, "additional properties 'keys'"),
    ({"accelerator": "h300"}, "h300 is not a key of accelerators, which has a100, h100, h200, l40s"),
]


@pytest.mark.parametrize(("entry", "message"), REFUSED)
def test_a_wrong_override_is_named(catalog: Any, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        render(catalog, "phi-4-h100", entry)


@pytest.mark.parametrize("name", ["Phi-4", "phi.4", "4-phi", "p" * 41])
def test_a_name_that_no_service_can_have_is_refused(catalog: Any, name: str) -> None:
    with pytest.raises(Exception, match=f"invalid propertyName '{name}'"):
        catalog.template({"catalog": {name: {**ON, "spec": {"model": {"source": "file:///m"}}}}})


@pytest.mark.parametrize("enabled", [True, False])
def test_the_chart_passes_the_linter(catalog: Any, enabled: bool, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"catalog": {name: {"enabled": enabled} for name in CATALOG}}))
    assert "0 chart(s) failed" in catalog("lint", "--strict", CHART, "--values", values)


def show_notes(catalog: Any, *settings: str) -> str:
    command = ("install", "sail", CHART, "--namespace", "harbour", "--dry-run=client")
    shown = catalog(*command, *(part for setting in settings for part in ("--set", setting)))
    return shown.rpartition("NOTES:")[2]


def test_the_notes_name_the_next_commands(catalog: Any) -> None:
    notes = show_notes(catalog, "catalog.qwen3-8b-h100.enabled=true", "catalog.phi-4-l40s.enabled=true")
    assert "Services in namespace harbour: phi-4-l40s, qwen3-8b-h100." in notes
    assert "kubectl wait infsvc/phi-4-l40s --namespace harbour --for=condition=Ready" in notes
    assert '{"model": "phi-4", "messages": ' in notes
    assert "acceleratorProfiles in the values of the operator's chart must define:\nh100, l40s." in notes
    assert "Secret" not in notes


def test_the_notes_name_the_secret_of_a_token(catalog: Any) -> None:
    settings = (
        "catalog.llama-3-1-8b-h100.enabled=true",
        "hubToken.name=mine",
        "accelerators.h100.profile=null",
    )
    notes = show_notes(catalog, *settings)
    assert "The hub gives meta-llama/Llama-3.1-8B-Instruct only to accounts" in notes
    assert "kubectl create secret generic mine --namespace harbour --from-literal=token=hf_..." in notes
    assert "profile" not in notes
    moved = "catalog.llama-3-1-8b-h100.spec.model.source=pvc://weights/llama"
    assert "Secret" not in show_notes(catalog, *settings, moved)


def test_the_notes_create_all_keys_of_a_secret(catalog: Any) -> None:
    own = "catalog.gemma-3-1b-l40s.spec.model.credentialsSecretRef"
    settings = ("catalog.llama-3-1-8b-h100.enabled=true", "catalog.gemma-3-1b-l40s.enabled=true")
    notes = show_notes(catalog, *settings, f"{own}.name=hub-token", f"{own}.key=google")
    keys = "--from-literal=google=hf_... --from-literal=token=hf_..."
    assert f"kubectl create secret generic hub-token --namespace harbour {keys}\n" in notes


@pytest.mark.parametrize(
    ("mode", "service"), [("Dedicated", "phi-4-l40s-gateway"), ("Shared", "mizzen-shared")]
)
def test_the_notes_name_the_service_of_the_gateway(catalog: Any, mode: str, service: str) -> None:
    notes = show_notes(catalog, "catalog.phi-4-l40s.enabled=true", f"defaults.gateway.mode={mode}")
    assert f"kubectl port-forward service/{service} --namespace harbour 8000:8000" in notes


def test_the_notes_of_an_empty_release_list_the_entries(catalog: Any) -> None:
    notes = show_notes(catalog)
    assert "No entry of the catalog is enabled" in notes
    assert ", ".join(sorted(CATALOG)) in notes
    assert "--set catalog.NAME.enabled=true" in notes

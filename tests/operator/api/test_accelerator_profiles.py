# SPDX-License-Identifier: Apache-2.0
"""Accelerator profiles are parsed strictly, and their values are defaults of a service's spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mizzen_operator.api.accelerator_profiles import (
    DEFAULT_RESOURCE,
    MAX_LISTED,
    AcceleratorProfile,
    ProfileConflictError,
    UnknownProfileError,
    apply_profile,
    parse_profiles,
)
from mizzen_operator.api.gpu_memory_check import check_gpu_memory
from mizzen_operator.api.reasons import MAX_MESSAGE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig, parse_config
from mizzen_operator.resources.field_origin import translate_message
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.rollout.revisions import controller_revision, restore_service
from service_kit import SPEC, service

TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
H100: dict[str, Any] = {
    "nodeSelector": {"gpu": "h100", "zone": "a"},
    "tolerations": [TAINT],
    "memory": "80Gi",
    "runtimeClassName": "nvidia",
}
MIG = {"resourceName": "nvidia.com/mig-1g.10gb", "memory": "9856Mi"}
CONFIG = OperatorConfig(engine_image="engine:1", accelerator_profiles=json.dumps({"h100": H100, "mig": MIG}))
PROFILES = CONFIG.profiles()


def with_profile(profile: str = "h100", **spec: Any) -> InferenceService:
    """Return a service that names a profile; `spec` may set fields of `accelerator` and other parts."""
    accelerator = {**SPEC["accelerator"], "profile": profile, **spec.pop("accelerator", {})}
    template = {"labels": {}, "tolerations": [], **spec.pop("podTemplate", {})}
    return service(accelerator=accelerator, podTemplate=template, **spec)


def applied(profile: str = "h100", **spec: Any) -> InferenceService:
    return apply_profile(with_profile(profile, **spec), PROFILES)


def test_a_profile_provides_what_the_spec_leaves_out() -> None:
    found = applied()
    assert found.accelerator.node_selector == {"gpu": "h100", "zone": "a"}
    assert found.pod_template["tolerations"] == [TAINT]
    assert found.pod_template["runtimeClassName"] == "nvidia"
    assert (found.accelerator.resource_name, found.gpu_memory) == ("nvidia.com/gpu", "80Gi")


def test_the_fields_of_a_spec_take_precedence() -> None:
    own = {"key": "team", "value": "a"}
    found = applied(
        accelerator={"nodeSelector": {"zone": "b", "disk": "ssd"}, "memory": "94Gi"},
        podTemplate={"tolerations": [own, TAINT], "runtimeClassName": "other"},
    )
    assert found.accelerator.node_selector == {"gpu": "h100", "zone": "b", "disk": "ssd"}
    assert found.pod_template["tolerations"] == [own, TAINT]
    assert found.pod_template["runtimeClassName"] == "other"
    assert found.gpu_memory == "94Gi"


@pytest.mark.parametrize(
    ("profile", "given", "expected"),
    [
        ("mig", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"),
        ("mig", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-2g.20gb"),
        ("h100", "nvidia.com/gpu", "nvidia.com/gpu"),
        ("h100", "example.com/gpu", "example.com/gpu"),
    ],
)
def test_the_default_resource_yields_to_the_profile(profile: str, given: str, expected: str) -> None:
    assert applied(profile, accelerator={"resourceName": given}).accelerator.resource_name == expected


def test_the_default_resource_is_that_of_the_crd() -> None:
    crd = yaml.safe_load((Path(__file__).parents[3] / "crds/inferenceservices.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert spec["accelerator"]["properties"]["resourceName"]["default"] == DEFAULT_RESOURCE


def test_the_cpu_and_services_without_a_profile_ignore_profiles() -> None:
    plain, on_cpu = service(), with_profile("missing", engine={**SPEC["engine"], "device": "CPU"})
    assert apply_profile(plain, PROFILES) is plain
    assert apply_profile(on_cpu, PROFILES) is on_cpu


def test_the_revision_depends_on_the_values_only() -> None:
    """A move between a profile and equal fields of the spec replaces no group; neither does the memory."""
    written = {
        "accelerator": {**SPEC["accelerator"], "nodeSelector": H100["nodeSelector"]},
        "podTemplate": {"labels": {}, "tolerations": [TAINT], "runtimeClassName": "nvidia"},
    }
    assert revision(applied(), CONFIG) == revision(service(**written), CONFIG)
    changes = ({"memory": "94Gi"}, {"tolerations": []}, {"nodeSelector": {}}, {"runtimeClassName": "x"})
    profiles = [parse_profiles(json.dumps({"h100": {**H100, **change}})) for change in changes]
    names = [revision(apply_profile(with_profile(), changed), CONFIG) for changed in profiles]
    assert names[0] == revision(applied(), CONFIG)
    assert len({*names}) == len(changes)


def test_a_recorded_revision_keeps_the_values_of_its_profile() -> None:
    found = applied(model={**SPEC["model"], "parameters": "8B"})
    name = revision(found, CONFIG)
    data = controller_revision(found, CONFIG, name, 1)["data"]
    for current in (service(podTemplate={"tolerations": []}), with_profile("gone"), applied("mig")):
        restored = restore_service(replace(current, rotate_keys="now"), data)
        assert restored.rotate_keys == "now"
        assert revision(restored, CONFIG) == name
        assert (restored.profile, restored.gpu_memory) == ("h100", "80Gi")
    plain = service(podTemplate={"tolerations": []})
    record = controller_revision(plain, CONFIG, "a", 1)["data"]
    restored = restore_service(found, record)
    assert revision(restored, CONFIG) == revision(plain, CONFIG)
    assert (restored.profile, restored.gpu_memory) == ("", "")


def test_the_fit_check_uses_the_memory_of_the_profile() -> None:
    model = {**SPEC["model"], "parameters": "200B"}
    fit = check_gpu_memory(applied(model=model))
    assert fit is not None and not fit.fits
    assert "0.9 of 80Gi (acceleratorProfiles.h100.memory);" in fit.message
    assert "or correct spec.model.parameters or acceleratorProfiles.h100.memory;" in fit.message
    smaller = {**model, "parameters": "70B"}
    fit = check_gpu_memory(applied(model=smaller, accelerator={"memory": "192Gi"}))
    assert fit is not None and fit.fits and fit.message.endswith("0.9 of 192Gi")


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_the_resource_of_a_profile_must_not_be_in_the_pod_template(kind: str) -> None:
    def template(resource: str) -> dict[str, Any]:
        return {"podTemplate": {"resources": {kind: {resource: "2"}}}}

    with pytest.raises(ProfileConflictError) as error:
        applied("mig", **template(MIG["resourceName"]))
    assert str(error.value) == (
        f"spec.podTemplate.resources.{kind} must not contain nvidia.com/mig-1g.10gb, the resource of the "
        "accelerator profile mig: remove it, and set its number with spec.accelerator.perPod"
    )
    applied("mig", **template("nvidia.com/mig-2g.20gb"))
    claim = {"resourceClaimTemplateName": "gpus"}
    applied("mig", **template(MIG["resourceName"]), accelerator=claim)


def test_an_unknown_profile_is_reported_with_the_known_ones() -> None:
    with pytest.raises(UnknownProfileError) as error:
        applied("h1000")
    assert str(error.value) == (
        "spec.accelerator.profile: there is no accelerator profile h1000; the operator has the profiles "
        "h100, mig: correct the name, or add the profile to acceleratorProfiles in the values of the "
        "operator's chart"
    )
    with pytest.raises(UnknownProfileError, match="the operator has no profiles: correct"):
        apply_profile(with_profile(), {})
    many = {f"{number:02}{'x' * 61}": AcceleratorProfile() for number in range(MAX_LISTED + 1)}
    with pytest.raises(UnknownProfileError, match=rf", {MAX_LISTED - 1:02}x+, \.\.\.: correct") as error:
        apply_profile(with_profile("y" * 63), many)
    assert len(str(error.value)) < MAX_MESSAGE


@pytest.mark.parametrize(
    ("message", "translated"),
    [
        (
            'Pod "a" is invalid: spec.tolerations[0].operator: Unsupported value: "Gt"',
            'spec.podTemplate.tolerations[0].operator: Unsupported value: "Gt"',
        ),
        ('pods "a" is forbidden: pod rejected: RuntimeClass "nvidia" not found', ""),
    ],
)
def test_a_rejected_pod_names_the_profile_that_may_be_wrong(message: str, translated: str) -> None:
    """The service itself may have no such field."""
    template = {"labels": {}, "tolerations": [], "volumes": [], "volumeMounts": []}
    found, plain = applied(podTemplate=template), service(podTemplate=template)
    pod = {"spec": {"containers": [{"env": [], "volumeMounts": []}], "volumes": []}}
    hint = " (the accelerator profile h100 may set this field)"
    assert translate_message(found, pod, message) == (translated or message) + hint
    assert translate_message(plain, pod, message) == (translated or message)
    other = "pods is forbidden: exceeded quota: gpus"
    assert translate_message(found, pod, other) == other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100", "must be a JSON object of profiles by name"),
        ("[]", "must be a JSON object of profiles by name"),
        ('{"h100": 80}', "profile 'h100': Expected `object`"),
        ('{"H_100": {}}', "profile 'H_100': Expected `str` matching regex"),
        ('{"h100": {"selector": {}}}', "profile 'h100': Object contains unknown field `selector`"),
        ('{"h100": {"memory": "80G"}}', "profile 'h100': Expected `str` matching regex"),
        ('{"h100": {"resourceName": "gpu"}}', "at `$.resourceName`"),
        ('{"h100": {"nodeSelector": {"a": true}}}', "Expected `str`, got `bool` - at `$.nodeSelector[...]`"),
        ('{"h100": {"tolerations": [{"op": "Exists"}]}}', "unknown field `op` - at `$.tolerations[0]`"),
        ('{"h100": {"nodeSelector": {"a b": "c"}}}', "Expected `str` matching regex"),
        ('{"h100": {"tolerations": [{"operator": "In"}]}}', "at `$.tolerations[0].operator`"),
        ('{"h100": {"tolerations": [{"key": "a b"}]}}', "at `$.tolerations[0].key`"),
        ('{"h100": {"tolerations": [{"value": "a"}]}}', "a toleration without key requires operator Exists"),
        (
            '{"h100": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}}',
            "a toleration with operator Exists must not have a value",
        ),
        (
            '{"h100": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}}',
            "tolerationSeconds requires effect NoExecute",
        ),
    ],
)
def test_an_invalid_profile_is_refused_by_its_name(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^--accelerator-profiles: ") as error:
        parse_config(["--accelerator-profiles", text], {})
    assert words in str(error.value)

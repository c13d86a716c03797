# SPDX-License-Identifier: Apache-2.0
"""Accelerator profiles: named settings for a kind of GPU node, which services use by their name.

The administrator of a cluster defines profiles in the chart's values; a service names one in
`spec.accelerator.profile`. The values of a profile are defaults: `apply_profile` puts them into the spec
before its revision is computed, so that the revision hash and the ControllerRevision contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from mizzen_operator.api.types import InferenceService

DEFAULT_RESOURCE = "nvidia.com/gpu"
"""Default of `spec.accelerator.resourceName` in the CRD.

The API server stores the default in every service. So a service that has this value counts as one that does
not choose a resource.
"""
MAX_LISTED = 10
"""Maximum number of profiles that a message lists, so that it is not longer than `reasons.MAX_MESSAGE`."""

_LABEL_VALUE = "([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_LABEL_KEY = "([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _text(pattern: str, max_length: int = 317) -> msgspec.Meta:
    return msgspec.Meta(pattern=f"^{pattern}$", max_length=max_length)


_Name = Annotated[str, _text("[a-z0-9]([-a-z0-9.]*[a-z0-9])?", 63)]
_Resource = Annotated[
    str, _text("[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", 253)
]
_Memory = Annotated[str, _text("[1-9][0-9]*[MG]i", 16)]
_LabelKey = Annotated[str, _text(_LABEL_KEY)]
_RuntimeClass = Annotated[str, _text("[a-z0-9]([-a-z0-9.]*[a-z0-9])?", 253)]
_LabelValue = Annotated[str, _text(_LABEL_VALUE)]


class UnknownProfileError(ValueError):
    """A service names a profile that the operator does not have; the message lists the profiles it has."""


class ProfileConflictError(ValueError):
    """A field of a service contradicts its profile; the message names the field and the remedy."""


class ProfileToleration(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True
):
    """A toleration of Kubernetes, with the fields of `spec.podTemplate.tolerations`.

    The API server rejects pods with an invalid toleration, so it must not be in a profile.
    """

    key: Annotated[str, _text(f"({_LABEL_KEY})?")] = ""
    operator: Literal["Equal", "Exists", "Lt", "Gt"] = "Equal"
    value: _LabelValue = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = None

    def __post_init__(self) -> None:
        """Check fields that depend on each other.

        Raises:
            ValueError: the API server would reject the toleration.
        """
        if not self.key and self.operator != "Exists":
            raise ValueError("a toleration without key requires operator Exists")
        if self.value and self.operator == "Exists":
            raise ValueError("a toleration with operator Exists must not have a value")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds requires effect NoExecute")


class AcceleratorProfile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Settings for a kind of GPU node. An empty value leaves the field of a service as it is.

    Attributes:
        resource_name: extended resource that pods request, with its domain.
        node_selector: labels that the node must have.
        tolerations: tolerations of the pods.
        memory: memory of one GPU, such as `141Gi`.
        runtime_class_name: RuntimeClass of the pods.
    """

    resource_name: _Resource = ""
    node_selector: dict[_LabelKey, _LabelValue] = {}
    tolerations: tuple[ProfileToleration, ...] = ()
    memory: _Memory = ""
    runtime_class_name: _RuntimeClass = ""


Profiles = Mapping[str, AcceleratorProfile]
"""Profiles by name."""


def parse_profiles(text: str) -> Profiles:
    """Parse profiles from a JSON object that maps names to profiles.

    Raises:
        ValueError: the text is not such an object; the message names the profile and the field.
    """
    try:
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise ValueError(f"must be a JSON object of profiles by name: {error}") from error
    return {name: _parse_profile(name, profile) for name, profile in given.items()}


def _parse_profile(name: str, text: msgspec.Raw) -> AcceleratorProfile:
    """Parse one profile; raise ValueError, with its name and the field, if it is invalid."""
    try:
        msgspec.convert(name, _Name)
        return msgspec.json.decode(text, type=AcceleratorProfile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"profile {name!r}: {error}") from error


def apply_profile(service: InferenceService, profiles: Profiles) -> InferenceService:
    """Return a service whose spec contains the values of its accelerator profile.

    The labels of both node selectors apply; for a label in both, the service's value. The profile's
    tolerations follow those of the service. The other fields of a profile apply if the service does not set
    them. A service without a profile, or on the CPU, is returned unchanged.

    Args:
        service: a service as the API server holds it.
        profiles: the operator's profiles.

    Raises:
        UnknownProfileError: the service names a profile that is not in `profiles`.
        ProfileConflictError: the service's `podTemplate.resources` contains the resource of its profile.
    """
    name = service.profile
    if not name:
        return service
    profile = profiles.get(name)
    if profile is None:
        raise UnknownProfileError(_describe_unknown(name, profiles))
    field = service.gpu_memory_field if service.gpu_memory else f"acceleratorProfiles.{name}.memory"
    accelerator = _accelerator(service.spec["accelerator"], profile)
    _check_resources(service, accelerator["resourceName"])
    template = _pod_template(service.pod_template, profile)
    return replace(
        service,
        accelerator=replace(
            service.accelerator,
            resource_name=accelerator["resourceName"],
            node_selector=accelerator["nodeSelector"],
        ),
        pod_template=template,
        gpu_memory=accelerator.get("memory", ""),
        gpu_memory_field=field,
        spec={**service.spec, "accelerator": accelerator, "podTemplate": template},
    )


def _accelerator(given: Mapping[str, Any], profile: AcceleratorProfile) -> dict[str, Any]:
    """Return `spec.accelerator` with the values of a profile."""
    chosen = given["resourceName"] != DEFAULT_RESOURCE or not profile.resource_name
    return {
        **({"memory": profile.memory} if profile.memory else {}),
        **given,
        "resourceName": given["resourceName"] if chosen else profile.resource_name,
        "nodeSelector": {**profile.node_selector, **given["nodeSelector"]},
    }


def _check_resources(service: InferenceService, resource: str) -> None:
    """Check that `podTemplate.resources` does not contain the resource of a profile.

    The operator sets the number of this resource, so the number in the template would have no effect. A rule
    of the CRD checks the same for `spec.accelerator.resourceName`.

    Raises:
        ProfileConflictError: it does.
    """
    given = service.pod_template.get("resources", {})
    if service.accelerator.claim_template:  # then no pod requests the resource of the profile
        return
    for kind in ("limits", "requests"):
        if resource in given.get(kind, {}):
            raise ProfileConflictError(
                f"spec.podTemplate.resources.{kind} must not contain {resource}, the resource of the "
                f"accelerator profile {service.profile}: remove it, and set its number with "
                "spec.accelerator.perPod"
            )


def _pod_template(given: Mapping[str, Any], profile: AcceleratorProfile) -> dict[str, Any]:
    """Return `spec.podTemplate` with the values of a profile."""
    own = list(given["tolerations"])
    added = [msgspec.to_builtins(toleration) for toleration in profile.tolerations]
    runtime = given.get("runtimeClassName") or profile.runtime_class_name
    return {
        **given,
        **({"runtimeClassName": runtime} if runtime else {}),
        "tolerations": [*own, *(toleration for toleration in added if toleration not in own)],
    }


def _describe_unknown(name: str, profiles: Profiles) -> str:
    known = sorted(profiles)
    listed = ", ".join(known[:MAX_LISTED]) + (", ..." if len(known) > MAX_LISTED else "")
    have = f"the operator has the profiles {listed}" if known else "the operator has no profiles"
    return (
        f"spec.accelerator.profile: there is no accelerator profile {name}; {have}: correct the name, or add "
        "the profile to acceleratorProfiles in the values of the operator's chart"
    )

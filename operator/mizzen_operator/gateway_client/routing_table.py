# SPDX-License-Identifier: Apache-2.0
"""Parses the routing tables of gateways (`GET /admin/engines`), and merges those of one service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """State of a gateway's API keys.

    Attributes:
        in_force: number of accepted keys.
        problem: why the gateway still accepts the previous keys instead of the keys in the present files;
            empty if it accepts the keys in the present files.
    """

    in_force: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Latest report of one gateway for one service.

    Attributes:
        serving: uids of pods that the gateway routes to; None if the gateway did not answer.
        holds_requests: whether the gateway holds requests because no engine serves.
        token_refused: whether the gateway rejected the admin token.
        key_names: names of the CURVE keys that the gateway has read.
        engine_key_names: one pair per connection to a pod: the pod's uid, and the name of the CURVE keys that
            the connection uses.
        verifying: uids of pods to which the gateway can send golden prompts.
        problems: pairs of a pod's uid and a description of its problem.
        protocol_mismatches: uids of pods whose wire protocol differs from the gateway's.
        api_keys: state of the API keys; None if requests need no key, or the gateway does not report it.
        quantizations: pairs of a pod's uid and a description of its quantized weights.
        tasks: pairs of a pod's uid and the task of its model.
        expert_groups: pairs of a pod's uid and its number of groups of ranks with different experts.
        images: uids of pods that accept images.
    """

    serving: frozenset[str] | None
    holds_requests: bool = False
    token_refused: bool = False
    key_names: frozenset[str] = frozenset()
    engine_key_names: frozenset[tuple[str, str]] = frozenset()
    verifying: frozenset[str] = frozenset()
    problems: frozenset[tuple[str, str]] = frozenset()
    protocol_mismatches: frozenset[str] = frozenset()
    api_keys: ApiKeys | None = None
    quantizations: frozenset[tuple[str, str]] = frozenset()
    tasks: frozenset[tuple[str, str]] = frozenset()
    expert_groups: frozenset[tuple[str, int]] = frozenset()
    images: frozenset[str] = frozenset()


NO_REPORT = GatewayReport(None)
"""Report of a gateway that did not answer."""


@dataclass(frozen=True, slots=True)
class RoutingState:
    """Merged reports of a service's ready gateways.

    Attributes:
        ready_gateways: number of ready gateway pods.
        reporting_gateways: number of ready gateway pods with a usable report.
        routed_by_all: uids of pods that every ready gateway routes to.
        routed_by_some: uids of pods that at least one gateway routes to.
        verifying: uids of pods to which at least one gateway can send golden prompts.
        token_refused: whether a gateway rejected the admin token.
        hung: addresses of ready gateways that hang.
        key_names: names of the CURVE keys that every ready gateway has read.
        engine_key_names: names of the CURVE keys of all connections to a pod, by the pod's uid.
        problems: problem of a pod, by its uid; the alphabetically first if gateways differ.
        protocol_mismatches: uids of pods whose wire protocol differs from that of every ready gateway; empty
            unless all ready gateways have reported.
        api_keys: the worst API key state that a gateway reports; None if no gateway reports one.
        quantizations: description of a pod's quantized weights, by its uid; pods with other weights, and pods
            to which no gateway is connected, are missing.
        tasks: task of a pod's model, by the pod's uid; unknown ones are missing.
        expert_groups: number of a pod's groups of ranks with different experts, by its uid; pods without
            experts, and pods to which no gateway is connected, are missing.
        images: true for each pod that accepts images, by its uid; other pods are missing.
    """

    ready_gateways: int = 0
    reporting_gateways: int = 0
    routed_by_all: frozenset[str] = frozenset()
    routed_by_some: frozenset[str] = frozenset()
    verifying: frozenset[str] = frozenset()
    token_refused: bool = False
    hung: frozenset[str] = frozenset()
    key_names: frozenset[str] = frozenset()
    engine_key_names: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    protocol_mismatches: frozenset[str] = frozenset()
    api_keys: ApiKeys | None = None
    quantizations: Mapping[str, str] = field(default_factory=dict[str, str])
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    expert_groups: Mapping[str, int] = field(default_factory=dict[str, int])
    images: Mapping[str, bool] = field(default_factory=dict[str, bool])


def parse_report(body: Any) -> GatewayReport:
    """Parse a gateway's routing table.

    Raises:
        KeyError, TypeError, ValueError: the body is not a routing table.
    """
    engines, entry = body["engines"], body.get("apiKeys")

    def uids_in_state(state: str) -> frozenset[str]:
        return frozenset(engine["uid"] for engine in engines if engine["state"] == state)

    return GatewayReport(
        uids_in_state("serving"),
        bool(body.get("waiting")),
        verifying=uids_in_state("verifying"),
        key_names=frozenset(body.get("keys", ())),
        engine_key_names=frozenset(
            (engine["uid"], name) for engine in engines for name in engine.get("keys", ())
        ),
        problems=frozenset(
            (engine["uid"], str(engine["problem"])) for engine in engines if engine.get("problem")
        ),
        protocol_mismatches=frozenset(
            engine["uid"] for engine in engines if engine.get("otherProtocol") is True
        ),
        api_keys=ApiKeys(int(entry["inForce"]), str(entry["problem"])) if entry else None,
        quantizations=frozenset(
            (engine["uid"], str(engine["quantization"])) for engine in engines if engine.get("quantization")
        ),
        tasks=frozenset((engine["uid"], str(engine["task"])) for engine in engines if engine.get("task")),
        expert_groups=frozenset(
            (engine["uid"], int(engine["expertGroups"])) for engine in engines if engine.get("expertGroups")
        ),
        images=frozenset(engine["uid"] for engine in engines if engine.get("images") is True),
    )


def merge_reports(reports: Sequence[GatewayReport], hung: frozenset[str] = frozenset()) -> RoutingState:
    """Merge the reports of all ready gateways.

    Args:
        reports: one report per ready gateway; NO_REPORT if the gateway did not answer.
        hung: addresses of ready gateways that hang.
    """
    routed_sets = [report.serving for report in reports if report.serving is not None]
    all_reported = bool(reports) and len(routed_sets) == len(reports)
    engine_key_names: dict[str, frozenset[str]] = {}
    for uid, name in (pair for report in reports for pair in report.engine_key_names):
        engine_key_names[uid] = engine_key_names.get(uid, frozenset()) | {name}
    by_some = frozenset[str]().union(*routed_sets)
    mismatches = (
        _intersection([report.protocol_mismatches for report in reports])
        if all_reported
        else frozenset[str]()
    )
    return RoutingState(
        ready_gateways=len(reports),
        reporting_gateways=len(routed_sets),
        routed_by_all=_intersection(routed_sets) if all_reported else frozenset(),
        routed_by_some=by_some,
        verifying=frozenset().union(*(report.verifying for report in reports)),
        hung=hung,
        token_refused=any(report.token_refused for report in reports),
        key_names=_intersection([report.key_names for report in reports]),
        engine_key_names=engine_key_names,
        problems=dict(sorted((pair for report in reports for pair in report.problems), reverse=True)),
        protocol_mismatches=mismatches - by_some,
        api_keys=min(
            (report.api_keys for report in reports if report.api_keys is not None),
            key=lambda entry: (not entry.problem, entry.in_force, entry.problem),
            default=None,
        ),
        quantizations=dict(pair for report in reports for pair in report.quantizations),
        tasks=dict(pair for report in reports for pair in report.tasks),
        expert_groups=dict(pair for report in reports for pair in report.expert_groups),
        images={uid: True for report in reports for uid in report.images},
    )


def _intersection(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the elements that all sets have in common; empty if there are no sets."""
    return frozenset.intersection(*sets) if sets else frozenset()

"""What a service's gateways say of its groups (`GET /admin/engines`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """What a gateway says of its API keys.

    Attributes:
        in_force: how many it accepts.
        problem: why the files as they are now are not in force: those before stay so; empty when they are.
    """

    in_force: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What a gateway said last.

    Attributes:
        serving: uids of pods that it routes to; None when it failed to answer.
        waiting: it holds requests because no engine serves.
        refused: it did not accept the token.
        known: names of the keys that it has.
        keys: uids of engines with the name of each key that they are reached with.
        verifying: uids of pods that it could ask golden prompts.
        problems: uids of engines with what is wrong with each.
        strangers: uids of pods that speak another protocol than it.
        api_keys: how it is about its API keys; None where nobody needs one, or it does not say.
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


NO_REPORT = GatewayReport(None)


@dataclass(frozen=True, slots=True)
class RoutingState:
    """What the ready gateways say.

    Attributes:
        asked: ready gateway pods.
        answered: those that gave a usable answer.
        by_all: uids of pods that every ready gateway routes to.
        by_some: uids of pods that at least one routes to.
        verifying: uids of pods that at least one could ask golden prompts.
        refused: a gateway did not accept the token.
        hung: addresses of ready gateways that hang.
        known: names of the keys that every ready gateway has.
        keys: names of the keys with which any of them reaches a pod, by its uid.
        problems: what is wrong with a pod, by its uid; the first in order where several say.
        strangers: uids of pods that speak another protocol than every ready gateway; none without gateways.
        api_keys: of the gateway that has the most trouble with them; None where none says anything.
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


def parse_report(body: Any) -> GatewayReport:
    """Read a gateway's routing table.

    Raises:
        KeyError, TypeError: it is none.
    """
    engines, entry = body["engines"], body.get("apiKeys")

    def uids_in_state(state: str) -> frozenset[str]:
        return frozenset(engine["uid"] for engine in engines if engine["state"] == state)

    return GatewayReport(
        uids_in_state("serving"),
        bool(body.get("waiting")),
        verifying=uids_in_state("verifying"),
        key_names=frozenset(body.get("keys", ())),
        engine_key_names=frozenset((engine["uid"], name) for engine in engines for name in engine.get("keys", ())),
        problems=frozenset((one["uid"], str(one["problem"])) for one in engines if one.get("problem")),
        protocol_mismatches=frozenset(engine["uid"] for engine in engines if engine.get("otherProtocol") is True),
        api_keys=ApiKeys(int(entry["inForce"]), str(entry["problem"])) if entry else None,
    )


def merge_reports(reports: Sequence[GatewayReport], hung: frozenset[str] = frozenset()) -> RoutingState:
    """What all ready gateways say together.

    Args:
        reports: of each of them.
        hung: addresses of those that hang.
    """
    routed_sets = [report.serving for report in reports if report.serving is not None]
    all_reported = bool(reports) and len(routed_sets) == len(reports)
    engine_key_names: dict[str, frozenset[str]] = {}
    for uid, name in (pair for report in reports for pair in report.engine_key_names):
        engine_key_names[uid] = engine_key_names.get(uid, frozenset()) | {name}
    by_some = frozenset[str]().union(*routed_sets)
    strangers = _intersection([report.protocol_mismatches for report in reports]) if all_reported else frozenset[str]()
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
        protocol_mismatches=strangers - by_some,
        api_keys=min(
            (report.api_keys for report in reports if report.api_keys is not None),
            key=lambda entry: (not entry.problem, entry.in_force, entry.problem),
            default=None,
        ),
    )


def _intersection(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    """What each of the sets has; nothing where there are none."""
    return frozenset.intersection(*sets) if sets else frozenset()

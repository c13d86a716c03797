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
class Answer:
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
    waiting: bool = False
    refused: bool = False
    known: frozenset[str] = frozenset()
    keys: frozenset[tuple[str, str]] = frozenset()
    verifying: frozenset[str] = frozenset()
    problems: frozenset[tuple[str, str]] = frozenset()
    strangers: frozenset[str] = frozenset()
    api_keys: ApiKeys | None = None


NO_ANSWER = Answer(None)


@dataclass(frozen=True, slots=True)
class Acknowledgements:
    """What the ready gateways say.

    Attributes:
        asked: ready gateway pods.
        answered: those that gave a usable answer.
        by_all: uids of pods that every ready gateway routes to.
        by_some: uids of pods that at least one routes to.
        verifying: uids of pods that at least one could ask golden prompts.
        refused: a gateway did not accept the token.
        silent: addresses of ready gateways that hang.
        known: names of the keys that every ready gateway has.
        keys: names of the keys with which any of them reaches a pod, by its uid.
        problems: what is wrong with a pod, by its uid; the first in order where several say.
        strangers: uids of pods that speak another protocol than every ready gateway; none without gateways.
        api_keys: of the gateway that has the most trouble with them; None where none says anything.
    """

    asked: int = 0
    answered: int = 0
    by_all: frozenset[str] = frozenset()
    by_some: frozenset[str] = frozenset()
    verifying: frozenset[str] = frozenset()
    refused: bool = False
    silent: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    keys: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    strangers: frozenset[str] = frozenset()
    api_keys: ApiKeys | None = None


def read_answer(body: Any) -> Answer:
    """Read a gateway's routing table.

    Raises:
        KeyError, TypeError: it is none.
    """
    engines, told = body["engines"], body.get("apiKeys")

    def those(state: str) -> frozenset[str]:
        return frozenset(engine["uid"] for engine in engines if engine["state"] == state)

    return Answer(
        those("serving"),
        bool(body.get("waiting")),
        verifying=those("verifying"),
        known=frozenset(body.get("keys", ())),
        keys=frozenset((engine["uid"], name) for engine in engines for name in engine.get("keys", ())),
        problems=frozenset((one["uid"], str(one["problem"])) for one in engines if one.get("problem")),
        strangers=frozenset(engine["uid"] for engine in engines if engine.get("otherProtocol") is True),
        api_keys=ApiKeys(int(told["inForce"]), str(told["problem"])) if told else None,
    )


def acknowledged(answers: Sequence[Answer], silent: frozenset[str] = frozenset()) -> Acknowledgements:
    """What all ready gateways say together.

    Args:
        answers: of each of them.
        silent: addresses of those that hang.
    """
    usable = [answer.serving for answer in answers if answer.serving is not None]
    everyone = bool(answers) and len(usable) == len(answers)
    keys: dict[str, frozenset[str]] = {}
    for uid, name in (pair for answer in answers for pair in answer.keys):
        keys[uid] = keys.get(uid, frozenset()) | {name}
    by_some = frozenset[str]().union(*usable)
    strangers = _in_all([answer.strangers for answer in answers]) if everyone else frozenset[str]()
    return Acknowledgements(
        asked=len(answers),
        answered=len(usable),
        by_all=_in_all(usable) if everyone else frozenset(),
        by_some=by_some,
        verifying=frozenset().union(*(answer.verifying for answer in answers)),
        silent=silent,
        refused=any(answer.refused for answer in answers),
        known=_in_all([answer.known for answer in answers]),
        keys=keys,
        problems=dict(sorted((pair for answer in answers for pair in answer.problems), reverse=True)),
        strangers=strangers - by_some,
        api_keys=min(
            (answer.api_keys for answer in answers if answer.api_keys is not None),
            key=lambda told: (not told.problem, told.in_force, told.problem),
            default=None,
        ),
    )


def _in_all(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    """What each of the sets has; nothing where there are none."""
    return frozenset.intersection(*sets) if sets else frozenset()

"""What a service's gateways say of its groups (`GET /admin/engines`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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

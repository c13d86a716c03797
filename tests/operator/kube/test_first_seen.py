# SPDX-License-Identifier: Apache-2.0
"""Ages of objects do not depend on any wall clock."""

from __future__ import annotations

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.kube.first_seen import FirstSeen

KEY, OTHER = ServiceKey("llm", "demo"), ServiceKey("llm", "other")


def test_an_object_ages_from_the_time_at_which_it_was_first_seen() -> None:
    now = [100.0]
    seen = FirstSeen(lambda: now[0])
    assert seen.ages(KEY, ["a"]) == {"a": 0}
    now[0] = 105.0
    assert seen.ages(KEY, ["a", "b"]) == {"a": 5, "b": 0}
    assert seen.ages(OTHER, ["a"]) == {"a": 0}
    now[0] = 107.0
    assert seen.ages(KEY, ["b"]) == {"b": 2}
    assert seen.ages(KEY, ["a", "b"]) == {"a": 0, "b": 2}, "an object that is gone is forgotten"
    seen.forget(KEY)
    assert seen.ages(KEY, ["b"]) == {"b": 0}

"""What is looked for, applied and removed of what a service may have or not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator import labels
from mizzen_operator.apply import Applier, covers
from mizzen_operator.metrics import Metrics
from mizzen_operator.refs import Ref

BUDGET: dict[str, Any] = {
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "x", "namespace": "a", "annotations": {labels.APPLIED: "1"}},
    "spec": {"maxUnavailable": 1},
}


class Server:
    """One object, and what was asked."""

    def __init__(self, there: dict[str, Any] | None = None) -> None:
        self.there, self.asked = there, [""]
        self.asked.clear()

    async def get(self, ref: Ref, *, live: bool = False) -> dict[str, Any] | None:
        self.asked.append("get")
        return self.there

    async def delete(self, ref: Ref, uid: str) -> bool:
        self.asked.append(f"delete {uid}")
        self.there = None
        return True


async def unwanted(server: Server, digests: dict[tuple[str, str], str], *, fresh: bool) -> list[str]:
    applier = Applier(server, Metrics())  # pyright: ignore[reportArgumentType]
    server.asked.clear()
    await applier.keep([BUDGET], digests, lambda live: None, wanted=False, fresh=fresh)
    return list(server.asked)


async def test_what_is_not_wanted_is_looked_for_once_and_removed() -> None:
    digests: dict[tuple[str, str], str] = {}
    server = Server({**BUDGET, "metadata": {**BUDGET["metadata"], "uid": "u"}})
    assert await unwanted(server, digests, fresh=False) == ["get", "delete u"]
    assert await unwanted(server, digests, fresh=False) == []
    digests.clear()  # once in a while all is looked for anew
    assert await unwanted(server, digests, fresh=False) == ["get"]


async def test_a_service_of_which_nothing_was_made_yet_has_nothing_to_remove() -> None:
    digests: dict[tuple[str, str], str] = {}
    assert await unwanted(Server(), digests, fresh=True) == []
    assert await unwanted(Server(), digests, fresh=False) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from("abc"),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("xyz"), below, max_size=3),
    max_leaves=12,
)


@given(wanted=JSON, data=st.data())
def test_more_fields_and_another_order_are_no_drift(wanted: Any, data: st.DataObject) -> None:
    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            more = data.draw(st.dictionaries(st.sampled_from("uvw"), JSON, max_size=1))
            return {**more, **{key: grown(below) for key, below in value.items()}}
        if isinstance(value, list):
            more = data.draw(st.lists(JSON, max_size=1))
            return data.draw(st.permutations([*map(grown, value), *more]))
        return value

    assert covers(grown(wanted), wanted)
    assert not covers({"there": grown(wanted)}, {"there": wanted, "absent": 1})

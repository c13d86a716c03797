# SPDX-License-Identifier: Apache-2.0
"""Names of child objects: valid for every kind, and different for different services."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen_operator.api import child_names

NAMES = st.from_regex(r"[a-z]([-.a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@settings(max_examples=100, deadline=None)
@given(NAMES)
def test_names_of_services_and_pods_are_valid(name: str) -> None:
    assert len(child_names.child_prefix(name)) <= 40
    for child in (
        child_names.gateway_name(name),
        child_names.ranks_service(name),
        child_names.leader_pod(name, "abcdefgh", 999, 99),
    ):
        assert LABEL.fullmatch(child)


def test_a_name_without_dots_is_unchanged_and_dots_do_not_collide() -> None:
    assert child_names.gateway_name("llama") == "llama-gateway"
    dotted = ["llama-3.1-8b", "llama.3.1-8b", "llama-3.1.8b", "a." + "b" * 38, "a." + "b" * 37 + "c"]
    names = {child_names.child_prefix(name) for name in [*dotted, "llama-3-1-8b"]}
    assert len(names) == len(dotted) + 1
    assert child_names.child_prefix("llama-3.1-8b").startswith("llama-3-1-8b-")

# SPDX-License-Identifier: Apache-2.0
"""The silence limit that an engine announces to gateways, derived from the duration of its steps."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mizzen.server.ranks.silence_limit import MIN_SIZE_STEPS, MIN_STEPS, SLOWEST_FACTOR, SilenceLimit
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from mizzen.wire.messages import Stats

STEPS = st.lists(
    st.tuples(st.floats(0.001, 30.0), st.integers(0, 40), st.integers(0, 2), st.integers(0, 3)), max_size=120
)


@given(STEPS)
def test_no_limit_is_given_for_prefill_new_sizes_and_first_steps(steps: list[Any]) -> None:
    limit, decode_rows, longest = SilenceLimit(), [], 0.0
    for seconds, rows, first_tokens, other_rows in steps:
        limit.record_step(seconds, rows, first_tokens, rows + other_rows)
        if first_tokens or other_rows or not rows:
            assert not limit.seconds
            continue
        decode_rows.append(rows)
        longest = max(longest, seconds)
        sizes = range(1, rows.bit_length() + 1)
        enough = all(
            sum(entry.bit_length() == size for entry in decode_rows) >= MIN_SIZE_STEPS for size in sizes
        )
        assert bool(limit.seconds) == (enough and len(decode_rows) >= MIN_STEPS)
        if limit.seconds:
            assert SLOWEST_FACTOR * seconds <= limit.seconds <= SLOWEST_FACTOR * longest


def test_an_arriving_request_drops_the_limit() -> None:
    limit = SilenceLimit()
    for _ in range(MIN_STEPS):
        limit.record_step(0.01, 1, 0, 1)
    assert limit.seconds
    limit.reset()
    assert not limit.seconds


def test_the_limit_is_withdrawn_before_a_prefill_runs(connect: Any, model: Any) -> None:
    """When a request causes the withdrawal, the frame with the withdrawal precedes the first token."""
    options = {"model": str(model), "wire_bind": "tcp://127.0.0.1:*", "step_milliseconds": 2.0}
    with SimulatedEngine(SimulateConfig(**options, drain_timeout_seconds=0.2)) as engine:
        gateway = connect(engine.endpoint)
        gateway.generate(1, [5, 6, 7], max_tokens=1800)
        while not gateway.expect(Stats).patience_seconds:
            pass
        gateway.generate(2, [8, 9], max_tokens=4)
        gateway.until(lambda: gateway.tokens[2])
        last = [entry for entry in gateway.others if isinstance(entry, Stats)][-1]
        assert not last.patience_seconds

"""What an engine says of how long it may be silent: only what its own steps have shown."""

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
def test_nothing_is_said_of_prompts_of_new_sizes_and_of_the_first_steps(steps: list[Any]) -> None:
    limit, alike, longest = SilenceLimit(), [], 0.0
    for seconds, rows, first_tokens, others in steps:
        limit.record_step(seconds, rows, first_tokens, rows + others)
        if first_tokens or others or not rows:
            assert not limit.seconds
            continue
        alike.append(rows)
        longest = max(longest, seconds)
        sizes = range(1, rows.bit_length() + 1)
        known = all(sum(one.bit_length() == size for one in alike) >= MIN_SIZE_STEPS for size in sizes)
        assert bool(limit.seconds) == (known and len(alike) >= MIN_STEPS)
        if limit.seconds:
            assert SLOWEST_FACTOR * seconds <= limit.seconds <= SLOWEST_FACTOR * longest


def test_an_arrival_takes_it_back() -> None:
    limit = SilenceLimit()
    for _ in range(MIN_STEPS):
        limit.record_step(0.01, 1, 0, 1)
    assert limit.seconds
    limit.reset()
    assert not limit.seconds


def test_it_is_taken_back_before_a_prompt_runs(connect: Any, model: Any) -> None:
    """The frame that takes it back comes before the first token of what made it necessary."""
    options = {"model": str(model), "wire_bind": "tcp://127.0.0.1:*", "step_milliseconds": 2.0}
    with SimulatedEngine(SimulateConfig(**options, drain_timeout_seconds=0.2)) as engine:
        gateway = connect(engine.endpoint)
        gateway.generate(1, [5, 6, 7], max_tokens=1800)
        while not gateway.expect(Stats).patience_seconds:
            pass
        gateway.generate(2, [8, 9], max_tokens=4)
        gateway.until(lambda: gateway.tokens[2])
        last = [one for one in gateway.others if isinstance(one, Stats)][-1]
        assert not last.patience_seconds

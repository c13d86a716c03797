# SPDX-License-Identifier: Apache-2.0
"""Token buckets never give out more tokens than their rate allows; a refill first pays off a debt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.gateway.auth.rate_limits import TokenBucket


@given(st.integers(1, 10**6), st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10**6)), max_size=50))
def test_bucket_never_gives_more_than_its_rate_and_one_minutes_worth(
    rate: int, takes: list[tuple[float, float]]
) -> None:
    now, given_out = 0.0, 0.0
    bucket = TokenBucket(rate, lambda: now)
    for pause, amount in takes:
        now += pause
        wait = bucket.consume(amount)
        if wait:
            now += wait if amount <= rate else 0.0
            if amount <= rate * (1 - 1e-9):
                now += 1e-6
                assert bucket.consume(amount) == pytest.approx(0.0, abs=1e-3)
                given_out += amount
        else:
            given_out += amount
        assert given_out <= rate + now * rate / 60 + 1e-3 * rate


def test_bucket_debt_is_paid_before_anything_is_given() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    assert bucket.consume(60) == 0.0
    bucket.refund(-30)
    assert bucket.level == -30
    assert bucket.consume(1) == pytest.approx(31)
    now[0] = 31.0
    assert bucket.consume(1) == 0.0
    bucket.set_rate(120)  # a new rate does not refund used tokens
    assert bucket.level == pytest.approx(60)

# SPDX-License-Identifier: Apache-2.0
"""The operator's options, and the staleness of its watches."""

from __future__ import annotations

import pytest

from mizzen_operator.config import parse_config
from mizzen_operator.informers import watch_health as watches_module
from mizzen_operator.informers.watch_health import FAILING_SECONDS, KINDS, STALE_SECONDS, WatchHealth
from mizzen_operator.metrics import Metrics


def test_an_option_takes_precedence_over_its_environment_variable() -> None:
    environment = {"MIZZEN_OPERATOR_WORKERS": "3", "MIZZEN_OPERATOR_NAMESPACE": "llm"}
    config = parse_config(["--workers", "5"], environment)
    assert (config.workers, config.namespace) == (5, "llm")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--workers", "0"], {}, "--workers must be at least 1, not 0"),
        (["--log-level", "loud"], {}, "--log-level must be one of debug, info, warning, error, not 'loud'"),
        ([], {"MIZZEN_OPERATOR_WORKERS": "many"}, "MIZZEN_OPERATOR_WORKERS: invalid literal"),
        (["--lease-seconds", "5"], {}, "--lease-seconds must exceed --renew-seconds"),
        (["--gateway-role-kind", "Role"], {}, "--gateway-role-kind Role needs --namespace"),
    ],
)
def test_the_error_names_an_invalid_option(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(arguments, environment)


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watches_module, "time", clock)
    return clock


def test_a_watch_without_responses_becomes_stale(clock: Clock) -> None:
    watches = WatchHealth(Metrics())
    clock.now += 10 * STALE_SECONDS
    assert watches.stale_kinds() == []  # this replica does not lead yet
    watches.start()
    clock.now += STALE_SECONDS - 1
    for kind in KINDS[1:]:
        watches.record_response(kind, True)
    clock.now += 2
    assert watches.stale_kinds() == [KINDS[0]]
    watches.record_response(KINDS[0], True)
    assert watches.stale_kinds() == []


def test_a_kind_that_has_never_got_a_response_becomes_stale_sooner(clock: Clock) -> None:
    watches = WatchHealth(Metrics())
    watches.start()
    clock.now += FAILING_SECONDS - 1
    assert watches.stale_kinds() == []
    watches.record_response("pods", True)
    clock.now += 2
    assert watches.stale_kinds() == sorted(set(KINDS) - {"pods"})


def test_a_failing_watch_becomes_stale_sooner_and_recovers(clock: Clock) -> None:
    watches = WatchHealth(Metrics())
    watches.start()
    for kind in KINDS:
        watches.record_response(kind, True)
    watches.record_response("pods", False)
    clock.now += FAILING_SECONDS / 2
    watches.record_response("pods", False)
    assert watches.stale_kinds() == []
    clock.now += FAILING_SECONDS
    assert watches.stale_kinds() == ["pods"]
    watches.record_response("pods", True)
    assert watches.stale_kinds() == []


def test_failures_of_unwatched_kinds_do_not_count(clock: Clock) -> None:
    watches = WatchHealth(Metrics())
    watches.start()
    for kind in KINDS:
        watches.record_response(kind, True)
    watches.record_response("secrets", False)
    clock.now += 2 * FAILING_SECONDS
    assert watches.stale_kinds() == []

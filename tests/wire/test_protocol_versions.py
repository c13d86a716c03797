# SPDX-License-Identifier: Apache-2.0
"""Gateway and engine use the newest version that both speak; without one, the text says what to upgrade."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mizzen.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Hello, Refused, Welcome
from mizzen.wire.protocol_versions import ProtocolMismatch, check_version, choose_version

ENDPOINT = "tcp://10.0.0.7:5557"
WELCOME = Welcome(PROTOCOL, "e", "i", "r", "m", "h", {}, 100, 100, (), 16, 4, False)


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [
        (OLDEST_PROTOCOL, PROTOCOL, PROTOCOL),  # a gateway of this release
        (OLDEST_PROTOCOL, 0, OLDEST_PROTOCOL),  # one of a release that names a single version
        (OLDEST_PROTOCOL - 1, OLDEST_PROTOCOL, OLDEST_PROTOCOL),  # one of the release before
        (PROTOCOL, PROTOCOL + 1, PROTOCOL),  # one of the next release
    ],
)
def test_the_newest_common_version_is_chosen(oldest: int, newest: int, chosen: int) -> None:
    assert choose_version(Hello(oldest, "g", newest)) == chosen


@pytest.mark.parametrize(
    ("oldest", "newest", "words", "outdated"),
    [
        (OLDEST_PROTOCOL - 1, 0, f"version {OLDEST_PROTOCOL - 1}", "gateway"),
        (PROTOCOL + 1, PROTOCOL + 2, f"versions {PROTOCOL + 1} to {PROTOCOL + 2}", "engine"),
    ],
)
def test_a_gateway_without_a_common_version_is_rejected(
    oldest: int, newest: int, words: str, outdated: str
) -> None:
    with pytest.raises(ProtocolMismatch) as mismatch:
        choose_version(Hello(oldest, "g", newest))
    assert str(mismatch.value) == (
        f"Hello.protocol: the gateway speaks {words} of the wire protocol, "
        f"this engine versions {OLDEST_PROTOCOL} to {PROTOCOL}; upgrade the {outdated}"
    )


@pytest.mark.parametrize(
    ("version", "outdated"), [(OLDEST_PROTOCOL - 1, "engine"), (PROTOCOL + 1, "gateway")]
)
def test_an_engine_without_a_common_version_is_rejected(version: int, outdated: str) -> None:
    with pytest.raises(ProtocolMismatch) as mismatch:
        check_version(msgspec.structs.replace(WELCOME, protocol=version), ENDPOINT)
    assert str(mismatch.value) == (
        f"Welcome.protocol: the engine at {ENDPOINT} speaks version {version} of the wire protocol, "
        f"this gateway versions {OLDEST_PROTOCOL} to {PROTOCOL}; upgrade the {outdated}"
    )


@pytest.mark.parametrize("version", [OLDEST_PROTOCOL, PROTOCOL])
def test_both_versions_of_an_engine_are_accepted(version: int) -> None:
    check_version(msgspec.structs.replace(WELCOME, protocol=version), ENDPOINT)


def test_an_engine_serves_gateways_of_three_releases_at_once(bench: Any) -> None:
    """The gateway of the release before names one version, and finds it in `Welcome.protocol`."""
    versions = {}
    for name, hello in {
        "before": Hello(OLDEST_PROTOCOL, "before"),
        "this": Hello(OLDEST_PROTOCOL, "this", PROTOCOL),
        "next": Hello(PROTOCOL, "next", PROTOCOL + 1),
    }.items():
        gateway = bench.gateway(hello=False)
        gateway.send(hello)
        versions[name] = bench.expect(gateway, Welcome).protocol
        bench.submit(gateway, 5)
    assert versions == {"before": OLDEST_PROTOCOL, "this": PROTOCOL, "next": PROTOCOL}
    assert bench.server.out.counters.other_protocol == 0
    outdated_gateway = bench.gateway(hello=False)
    outdated_gateway.send(Hello(OLDEST_PROTOCOL - 1, "ancient"))
    assert "upgrade the gateway" in bench.expect(outdated_gateway, Refused).message

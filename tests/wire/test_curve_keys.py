# SPDX-License-Identifier: Apache-2.0
"""Unusable CURVE key files are named in errors; a running engine or gateway keeps its previous keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from mizzen.wire.curve_keys import KeyFileError, KeyFolder, WireKeys, find_pair, load_ring, write_keys

UNDECODABLE_KEY = b"#" * 40
"""40 Z85 characters that do not decode, because five `#` exceed 32 bits."""


def unrelated_public_key() -> bytes:
    return zmq.curve_keypair()[0]


UNUSABLE_FILES = [
    ({"gateway.public": UNDECODABLE_KEY}, r"gateway\.public contains Z85 characters that do not decode"),
    (
        {"next.gateway.public": UNDECODABLE_KEY},
        r"next\.gateway\.public contains Z85 characters that do not decode",
    ),
    ({"engine.secret": UNDECODABLE_KEY}, r"engine\.secret contains Z85 characters that do not decode"),
    ({"engine.public": unrelated_public_key()}, r"engine\.public is not the public key of .*engine\.secret"),
    (
        {"next.engine.public": unrelated_public_key(), "next.engine.secret": z85.encode(bytes(32))},
        r"next\.engine\.public is not the public key of .*next\.engine\.secret",
    ),
    ({"generation": b"9" * 5000}, r"generation has a number of 5000 digits; at most 18 are allowed"),
]
IDS = [
    "undecodable peer key",
    "undecodable next peer key",
    "undecodable secret",
    "mismatched pair",
    "mismatched next pair",
    "generation with too many digits",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(("files", "reason"), UNUSABLE_FILES, ids=IDS)
def test_unusable_key_file_is_named_at_start(folder: Path, files: dict[str, bytes], reason: str) -> None:
    write(folder, files)
    with pytest.raises(KeyFileError, match=reason):
        KeyFolder(folder, "engine")


@pytest.mark.parametrize(("files", "reason"), UNUSABLE_FILES, ids=IDS)
def test_running_engine_keeps_its_keys_if_files_become_unusable(
    make_bench: Callable[..., Any],
    folder: Path,
    files: dict[str, bytes],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring = load_ring(folder, "gateway")
    keys = WireKeys(ring.own[0].public, ring.own[0].secret, ring.peers[0])
    bench = make_bench(keys=KeyFolder(folder, "engine"))
    gateway = bench.gateway(keys=keys)
    write(folder, files)
    for handle in range(3):
        bench.now += 2
        bench.submit(gateway, handle)
    bench.submit(bench.gateway(keys=keys), 1)  # a new gateway can connect as before
    warnings = [record for record in caplog.records if record.getMessage() == "cannot read the CURVE keys"]
    assert len(warnings) == 1


def test_running_gateway_keeps_its_keys_if_files_become_unusable(folder: Path) -> None:
    keys = KeyFolder(folder, "gateway")
    ring_before = keys.ring
    for name in ("next.engine.public", "engine.public", "gateway.secret"):
        good = (folder / name).read_bytes() if (folder / name).exists() else None
        write(folder, {name: UNDECODABLE_KEY})
        assert not keys.refresh()
        assert keys.ring == ring_before
        (folder / name).unlink() if good is None else write(folder, {name: good})
    write(folder, {"gateway.public": unrelated_public_key()})
    assert not keys.refresh()
    assert keys.ring == ring_before


def test_find_pair_rejects_files_that_are_not_a_pair(folder: Path) -> None:
    public = unrelated_public_key()
    write(folder, {"engine.public": public})
    with pytest.raises(KeyFileError, match="is not the public key of"):
        find_pair(folder, "engine", public.decode())


def test_unreadable_key_folder_keeps_the_previous_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFolder(folder, "engine")

    def stat(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    assert not keys.refresh()
    with pytest.raises(KeyFileError, match=r"cannot read the key folder .*: Permission denied"):
        load_ring(folder, "engine")


def test_generation_accepts_every_number_the_operator_can_reach(folder: Path) -> None:
    write(folder, {"generation": b"9" * 18 + b"\n"})
    assert load_ring(folder, "engine").generation == 10**18 - 1

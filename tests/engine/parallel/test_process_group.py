# SPDX-License-Identifier: Apache-2.0
"""Process groups set the environment variables and addresses that NCCL and gloo use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mizzen.parallel.process_group import ENVIRONMENT, RankConfig, RankGroup
from ports import free_ports


class RendezvousReached(Exception):
    """Raised at the point where the ranks would rendezvous."""


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Yield a dict that receives the environment variables when a CUDA group initializes NCCL."""
    environment: dict[str, str] = {}

    def init(*given: Any, **options: Any) -> None:
        environment.update(os.environ)
        raise RendezvousReached

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    yield environment
    for name in ENVIRONMENT:
        os.environ.pop(name, None)


def join(folder: Path) -> None:
    place = RankConfig(rank=0, size=1, rendezvous=f"file://{folder}/meet", device=torch.device("cuda", 0))
    with pytest.raises(RendezvousReached):
        RankGroup(place)


@pytest.mark.parametrize(
    ("address", "rendezvous", "expected_host"),
    [("", "file:///{}/meet", "127.0.0.1"), ("127.0.0.3", "tcp://127.0.0.3:{}/x", "127.0.0.3")],
)
def test_gloo_listens_only_on_loopback_or_the_pods_address(
    address: str, rendezvous: str, expected_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, gloo listens at the address of the host name."""
    device, used = dist.ProcessGroupGloo.create_device, []

    def create_device(*, hostname: str) -> Any:
        used.append(hostname)
        return device(hostname=hostname)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_device)
    meeting = rendezvous.format(free_ports("127.0.0.3") if address else tmp_path)
    place = RankConfig(rank=0, size=1, rendezvous=meeting, device=torch.device("cpu"), address=address)
    RankGroup(place).close()
    assert used == [expected_host]


def test_multicast_is_disabled_before_nccl_starts(meet: dict[str, str], tmp_path: Path) -> None:
    join(tmp_path)
    assert meet["NCCL_NVLS_ENABLE"] == "0"
    assert meet["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert meet["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_variables_that_are_already_set_are_kept(
    meet: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    join(tmp_path)
    assert meet["NCCL_NVLS_ENABLE"] == "1"

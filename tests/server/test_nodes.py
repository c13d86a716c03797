# SPDX-License-Identifier: Apache-2.0
"""A group of several nodes serves as one engine, and all its processes exit if one of them fails."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_process import SECONDS, EngineProcess
from live_processes import is_alive
from ports import free_ports

LEADER, OTHER = "127.0.0.2", "127.0.0.3"


class Node(EngineProcess):
    """A node of a group: `mizzen engine` as the main process of a pod."""

    def __init__(self, folder: Path, address: str, options: dict[str, Any]) -> None:
        folder.mkdir()
        super().__init__(folder, address, **{"nodes": 2, "ranks_address": address, **options})

    def serves(self) -> bool:
        return self.get("/readyz").get("state") == "serving"

    @property
    def rank(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def ended(self) -> tuple[int, str]:
        """Wait for the exit; return the exit code and the termination message."""
        code = self.process.wait(SECONDS)
        return code, self.message.read_text().strip() if self.message.exists() else ""


class Pair:
    """A group of two nodes; by default, each has an IPv4 address."""

    def __init__(self, folder: Path, leader: str = LEADER, other: str = OTHER) -> None:
        self.folder, self.port = folder, free_ports(leader, 3)
        self.addresses = (leader, other)
        self.nodes: list[Node] = []

    def node(self, rank: int, **options: Any) -> Node:
        settings = {"ranks_port": self.port, "node_rank": rank, **options}
        if rank:
            settings.setdefault("leader_address", self.addresses[0])
        folder = self.folder / f"node-{len(self.nodes)}"
        self.nodes.append(Node(folder, self.addresses[rank], settings))
        return self.nodes[-1]

    def both(self, **options: Any) -> tuple[Node, Node]:
        """Start both nodes and wait until they serve."""
        leader, follower = self.node(0, **options), self.node(1, **options)
        leader.until(leader.serves)
        follower.until(follower.serves)
        return leader, follower


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    node_pair = Pair(tmp_path)
    yield node_pair
    for node in node_pair.nodes:
        node.close()


def test_a_group_serves_over_ipv6(connect: Callable[[str], Any], tmp_path: Path) -> None:
    """The nodes' messages, the plans and the process group of the ranks all use IPv6 addresses."""
    group = Pair(tmp_path, "::1", "::1")
    try:
        leader, follower = group.both()
        gateway = connect(leader.get("/readyz")["wire"])
        gateway.generate(1, prompt=[7, 8, 9], max_tokens=20, ignore_eos=True, temperature=0.0)
        gateway.until(lambda: 1 in gateway.ends, SECONDS)
        assert len(gateway.tokens[1]) == 20
        connections = psutil.Process(follower.rank.pid).net_connections("tcp")
        assert any(item.raddr and item.raddr.ip == "::1" for item in connections)
        follower.process.send_signal(signal.SIGTERM)
        assert (leader.ended(), follower.ended()) == ((0, ""), (0, ""))
    finally:
        for node in group.nodes:
            node.close()


def test_a_group_serves_the_tokens_of_a_single_rank_and_drains_as_a_whole(
    pair: Pair, connect: Callable[[str], Any], tmp_path: Path
) -> None:
    """Greedy tokens equal those of a single rank; SIGTERM on node 1 makes node 0 drain."""
    alone = Node(tmp_path / "alone", LEADER, {"tensor": 1, "nodes": 1})
    try:
        outputs: list[list[int]] = []
        leader, follower = pair.both()
        alone.until(alone.serves)
        for node in (alone, leader):
            gateway = connect(node.get("/readyz")["wire"])
            for rid in range(1, 5):
                gateway.generate(rid, prompt=[7 + rid, 8, 9], max_tokens=40, ignore_eos=True, temperature=0.0)
            gateway.until(lambda: len(gateway.ends) == 4, 60)  # noqa: B023 - called here alone
            outputs += [gateway.tokens[rid] for rid in range(1, 5)]
        assert outputs[:4] == outputs[4:]
        assert "wire" not in follower.get("/readyz")
        gateway.generate(9, prompt=[7, 8, 9], max_tokens=200, ignore_eos=True)
        gateway.until(lambda: len(gateway.tokens[9]) > 5, SECONDS)
        follower.process.send_signal(signal.SIGTERM)
        gateway.until(lambda: 9 in gateway.ends, SECONDS)
        assert len(gateway.tokens[9]) == 200, "the running request was drained"
        assert (leader.ended(), follower.ended()) == ((0, ""), (0, ""))
    finally:
        alone.close()


@pytest.mark.parametrize(
    ("victim", "number", "leader_reason", "follower_reason"),
    [
        ("rank of 1", signal.SIGKILL, "rank_died: node 1: rank 1 (process", "group_failed: node 1: rank 1"),
        ("rank of 1", signal.SIGSTOP, "watchdog: rank 1 (process", "group_failed: rank 1 (process"),
        ("node 1", signal.SIGKILL, "node_lost: node 1 has sent nothing for", None),
        ("node 0", signal.SIGKILL, None, "leader_lost: node 0 at tcp://127.0.0.2:"),
        ("node 0", signal.SIGSTOP, None, "leader_lost: node 0 at tcp://127.0.0.2:"),
    ],
)
def test_any_loss_stops_the_whole_group_with_the_reason(
    victim: str,
    number: signal.Signals,
    leader_reason: str | None,
    follower_reason: str | None,
    pair: Pair,
    connect: Callable[[str], Any],
) -> None:
    nodes = pair.both(rank_deadline_seconds=3)
    gateway = connect(nodes[0].get("/readyz")["wire"])
    gateway.generate(1, prompt=[7, 8, 9], max_tokens=1500, ignore_eos=True)
    gateway.until(lambda: len(gateway.tokens[1]) > 5, SECONDS)
    ranks = [node.rank for node in nodes]
    victim_kind, _, victim_rank = victim.rpartition(" ")
    node = nodes[int(victim_rank)]
    (node.rank if victim_kind == "rank of" else node.process).send_signal(number)
    for remaining, expected in zip(nodes, (leader_reason, follower_reason), strict=True):
        if expected is not None:
            code, words = remaining.ended()
            assert code == 1
            assert words.startswith(expected), words
    if number == signal.SIGSTOP and victim_kind != "rank of":
        node.process.send_signal(signal.SIGCONT)  # once it continues, it exits, too
    for remaining in nodes:
        assert remaining.process.wait(SECONDS) != 0
    assert not any(is_alive(rank) for rank in ranks)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_group_port_in_use_is_reported_with_its_option(offset: int, pair: Pair) -> None:
    with socket.create_server((LEADER, pair.port + offset)):
        leader = pair.node(0)
        if offset:
            pair.node(1)  # the group starts only after node 1 has joined
        code, words = leader.ended()
    assert code == 1
    assert f"{LEADER}:{pair.port + offset}" in words
    assert "--ranks-port" in words, words

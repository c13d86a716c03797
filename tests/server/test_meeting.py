"""What the nodes of a group make of one another: real sockets and keys, no ranks, a clock of the test's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import DEMO, SECONDS
from mizzen.server.config import EngineConfig
from mizzen.server.config_check import check_config
from mizzen.server.exit_reason import ExitReason
from mizzen.server.metric_catalogue import Phase
from mizzen.server.nodes.follower_node import FollowerNode
from mizzen.server.nodes.group import describe_differences, shared_settings
from mizzen.server.nodes.leader_node import LeaderNode
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.wire.curve_keys import KeyFolder, find_pair, write_keys
from mizzen.wire.endpoint import UnsafeEndpoint
from mizzen.wire.ranks.node_messages import PROTOCOL, Join, NodeClient, NodeRefused, RankReport
from mizzen.wire.ranks.plan_ring import CAPACITY
from ports import free_ports

LEADER = "127.0.0.2"


class Meeting:
    """Node 0 and others in one process; time passes as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.now = folder, free_ports(LEADER, 3), 100.0
        self.made: list[LeaderNode | FollowerNode] = []

    def config(self, rank: int, nodes: int = 2, **options: Any) -> EngineConfig:
        address = LEADER if rank == 0 else f"127.0.0.{3 + rank}"
        given = {"tensor": nodes, "nodes": nodes, "ranks_port": self.port, "node_rank": rank, **options}
        return EngineConfig(model=str(DEMO), ranks_address=address, leader_address=LEADER, **given)

    def leader(self, keys: Path | None = None, **options: Any) -> LeaderNode:
        self.made.append(LeaderNode(self.config(0, **options), KeyFolder(keys, "engine") if keys else None))
        return self.made[-1]  # type: ignore[return-value]

    def follower(self, rank: int = 1, keys: Path | None = None, **options: Any) -> FollowerNode:
        folder = KeyFolder(keys, "engine") if keys else None
        self.made.append(FollowerNode(self.config(rank, **options), folder, self.now))
        return self.made[-1]  # type: ignore[return-value]

    def exchange_reports(
        self, *nodes: LeaderNode | FollowerNode, own: ExitReason | None = None, exit_requested: bool = False
    ) -> None:
        for node in nodes:
            last = node is nodes[-1]
            node.exchange_reports([RANK], own if last else None, exit_requested and last, self.now)

    def until(self, condition: Callable[[], Any], *nodes: LeaderNode | FollowerNode, **told: Any) -> Any:
        """Let nodes talk until something is so; their clock hardly moves."""
        deadline = time.monotonic() + SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline
            self.exchange_reports(*nodes, **told)
            time.sleep(0.01)
        return found

    def begun(self, *others: FollowerNode, **options: Any) -> tuple[LeaderNode, FollowerNode]:
        leader, other = self.leader(**options), self.follower(**options)
        self.until(lambda: leader.started and other.started and leader.phases[0], leader, other)
        return leader, other


RANK = RankReport(int(Phase.SERVING), "", 0.1, 7, 6, 123)
FAILED = ExitReason(1, "rank_failed", "rank 1 failed: ValueError: x")
DIED = ExitReason(1, "rank_died", "rank 1 (process 123) was killed by signal 9")
WRONG = ExitReason(
    2, "wrong configuration", "rank 1 failed: ValueError: --attention-decode fa3 does not run here"
)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    for node in made.made:
        node.close(ExitReason(0))


def test_all_begin_when_all_are_there(meeting: Meeting) -> None:
    leader, first = meeting.leader(nodes=3), meeting.follower(nodes=3)
    meeting.until(lambda: first.group, leader, first)
    assert not leader.started
    assert leader.describe_wait() == "waits for nodes 2 of 3"
    assert first.describe_wait() == "node 0 waits for other nodes"
    second = meeting.follower(2, nodes=3)
    meeting.until(lambda: first.started and second.started, leader, first, second)
    assert first.group == second.group == leader.group
    meeting.until(lambda: leader.phases == [Phase.SERVING] * 2, leader, first, second)
    assert [heartbeat.launched for heartbeat in leader.read_heartbeats(meeting.now)] == [7, 7]
    assert leader.decide_exit(None, meeting.now) is None


def test_a_node_that_left_before_all_were_there_is_waited_for_again(meeting: Meeting) -> None:
    leader, first = meeting.leader(nodes=3), meeting.follower(nodes=3)
    meeting.until(lambda: first.group, leader, first)

    def forgotten() -> bool:
        meeting.now += 60  # what it said before may still be on its way
        return leader.describe_wait() == "waits for nodes 1, 2 of 3"

    meeting.until(forgotten, leader)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"page_size": 32, "prefix_cache": "none"}, "--page-size (32 there, 16 here), --prefix-cache (none"),
        ({"revision": "b"}, "--revision (b there,  here)"),
        ({"tensor": 4}, "--tensor (4 there, 2 here)"),
    ],
)
def test_a_node_that_differs_is_refused_with_the_difference(
    changed: dict[str, Any], said: str, meeting: Meeting
) -> None:
    leader, other = meeting.leader(), meeting.follower(**changed)
    end = meeting.until(lambda: other.decide_exit(None, meeting.now), leader, other)
    assert (end.code, end.kind) == (2, "refused")
    assert said in end.reason
    assert said in leader.describe_wait()
    assert not leader.started


def test_another_release_and_another_node_are_refused(meeting: Meeting) -> None:
    leader = meeting.leader()
    for number, (protocol, node, said) in enumerate(
        [(PROTOCOL + 1, 1, "of another release"), (PROTOCOL, 2, "--node-rank 2 is not between 1 and 1")]
    ):
        client = NodeClient(f"tcp://{LEADER}:{meeting.port}", None, f"stranger-{number}")
        client.send(Join(protocol, "life", node, {}))
        found: list[Any] = []
        meeting.until(lambda: found.extend(client.receive()) or found, leader)  # noqa: B023 - called here alone
        assert isinstance(found[0], NodeRefused)
        assert said in found[0].reason
        client.close()


def test_nobody_joins_a_group_that_runs(meeting: Meeting) -> None:
    leader, _ = meeting.begun()
    again = meeting.follower()
    end = meeting.until(lambda: again.decide_exit(None, meeting.now), leader, again)
    assert (end.code, end.kind) == (1, "refused")
    assert "all of its nodes have to start anew" in end.reason


def test_a_node_number_that_is_given_twice_is_refused_and_the_first_stays(meeting: Meeting) -> None:
    leader, first = meeting.leader(nodes=3), meeting.follower(nodes=3)
    meeting.until(lambda: first.group, leader, first)
    second = meeting.follower(nodes=3)

    def told() -> ExitReason | None:
        meeting.now += 0.02
        return second.decide_exit(None, meeting.now)

    end = meeting.until(told, leader, first, second)
    assert (end.code, end.kind) == (1, "refused")
    assert "another node 1 is there already: give each its own --node-rank" in end.reason
    assert first.decide_exit(None, meeting.now) is None
    third = meeting.follower(2, nodes=3)
    meeting.until(lambda: first.started and third.started, leader, first, third)


def test_a_node_that_was_started_again_takes_its_own_place(meeting: Meeting) -> None:
    """Even at once, while node 0 does not know yet that the one before is gone."""
    leader, first = meeting.leader(nodes=3), meeting.follower(nodes=3)
    meeting.until(lambda: first.group, leader, first)
    first.close(ExitReason(0))
    meeting.made.remove(first)
    again = meeting.follower(nodes=3)

    def let_in() -> bool:
        meeting.now += 0.02
        assert again.decide_exit(None, meeting.now) is None
        return bool(again.group)

    meeting.until(let_in, leader, again)
    assert leader.describe_wait() == "waits for nodes 2 of 3"


def test_a_node_0_that_has_started_anew_does_not_know_the_group(meeting: Meeting) -> None:
    leader, other = meeting.begun()
    leader._server.close()
    meeting.made.remove(leader)
    new = meeting.leader()
    end = meeting.until(lambda: other.decide_exit(None, meeting.now), new, other)
    assert (end.kind, "node 0 has started anew" in end.reason) == ("refused", True)


def test_the_keys_are_needed(meeting: Meeting, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_keys(tmp_path / name)
    leader = meeting.leader(tmp_path / "ours")
    stranger, other = meeting.follower(1, tmp_path / "theirs"), meeting.follower(1, tmp_path / "ours")
    meeting.until(lambda: other.started, leader, stranger, other)
    assert stranger.group == ""
    assert (
        stranger.describe_wait()
        == f"waits for node 0 at tcp://{LEADER}:{meeting.port}, with the keys of this one"
    )
    assert other.key == leader.key == (tmp_path / "ours" / "engine.public").read_text()


def test_nodes_meet_whichever_generation_of_keys_each_has_first(meeting: Meeting, tmp_path: Path) -> None:
    """Node 0 holds the present generation and the next; the other one holds the next alone, then both."""
    both, late = tmp_path / "both", tmp_path / "late"
    write_keys(both)
    write_keys(late)
    for half in ("public", "secret"):
        (both / f"next.engine.{half}").write_bytes((late / f"engine.{half}").read_bytes())
    leader, other = meeting.leader(both), meeting.follower(1, late)
    for _ in range(20):
        meeting.exchange_reports(leader, other)
    assert other.group == ""
    for half in ("public", "secret"):
        (late / f"next.engine.{half}").write_bytes((both / f"engine.{half}").read_bytes())

    def met() -> bool:
        meeting.now += 0.2
        return other.started

    meeting.until(met, leader, other)
    assert other.key == (both / "engine.public").read_text()
    pair = find_pair(late, "engine", other.key)
    assert pair.public.decode() == other.key


def test_a_node_0_that_waits_takes_up_new_keys(meeting: Meeting, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    leader = meeting.leader(tmp_path / "keys")
    before = leader.key
    write_keys(tmp_path / "keys")
    other = meeting.follower(1, tmp_path / "keys")
    meeting.now += 10
    meeting.until(lambda: other.started, leader, other)
    assert before != leader.key == other.key


@pytest.mark.parametrize("kind", [FAILED, DIED, WRONG])
def test_a_node_that_fails_ends_the_group(kind: ExitReason, meeting: Meeting) -> None:
    leader, other = meeting.begun()

    def over() -> ExitReason | None:
        meeting.now += 0.05
        return leader.decide_exit(None, meeting.now)

    end = meeting.until(over, leader, other, own=kind)
    assert (end.code, end.kind, end.reason) == (kind.code, kind.kind, f"node 1: {kind.reason}")
    leader.close(end)
    meeting.made.remove(leader)
    end = meeting.until(lambda: other.decide_exit(kind, meeting.now), other)
    assert (end.code, end.kind, end.reason) == (1, "group_failed", f"node 1: {kind.reason}")


def test_what_was_killed_goes_before_what_then_fails(meeting: Meeting) -> None:
    """Rank 0 finds its connection closed before node 1 tells that its rank was killed."""
    leader, other = meeting.begun()
    own = ExitReason(1, "rank_failed", "rank 0 failed: connection closed by peer")
    assert leader.decide_exit(own, meeting.now) is None
    end = meeting.until(lambda: leader.decide_exit(own, meeting.now), leader, other, own=DIED)
    assert end.reason == f"node 1: {DIED.reason}"


def test_a_node_that_is_silent_ends_the_group(meeting: Meeting) -> None:
    leader, other = meeting.begun()
    meeting.now += 7.9
    assert leader.decide_exit(None, meeting.now) is None
    assert other.decide_exit(None, meeting.now) is None
    assert leader.read_heartbeats(meeting.now)[0].alive == meeting.now, "its ranks are not blamed meanwhile"
    meeting.now += 0.5
    lost = leader.decide_exit(None, meeting.now)
    assert lost is not None
    assert (lost.kind, lost.reason[:28]) == ("node_lost", "node 1 has said nothing for ")
    gone = other.decide_exit(None, meeting.now)
    assert gone is not None
    assert gone.kind == "leader_lost"


def test_a_node_that_is_asked_to_end_waits_for_node_0(meeting: Meeting) -> None:
    leader, other = meeting.begun()
    meeting.until(lambda: leader.exit_requested, leader, other, exit_requested=True)
    assert other.decide_exit(ExitReason(0), meeting.now) is None, "its ranks may end before node 0 does"
    leader.close(ExitReason(0))
    meeting.made.remove(leader)
    assert meeting.until(lambda: other.decide_exit(None, meeting.now), other) == ExitReason(0)


def test_ranks_of_nodes_that_have_not_told_of_them_have_their_places_too(meeting: Meeting) -> None:
    leader, others = meeting.leader(nodes=3), [meeting.follower(rank, nodes=3) for rank in (1, 2)]
    meeting.until(lambda: leader.started, leader, *others)
    assert len(leader.read_heartbeats(meeting.now)) == 2
    meeting.until(
        lambda: all(heartbeat.serving for heartbeat in leader.read_heartbeats(meeting.now)), leader, *others
    )


def test_steps_that_ranks_cannot_share_are_refused() -> None:
    config = EngineConfig(model=str(DEMO), tensor=2, context_length=1 << 20, prefill_chunk_tokens=10**8)
    with pytest.raises(
        ValueError, match=r"--prefill-chunk-tokens 100000000 .* with --tensor, 33554432 at most"
    ):
        check_config(config)


def test_ranks_share_room_for_the_largest_plan() -> None:
    """Every slot begins with a cached prefix as long as can be, and tells its pages."""
    config = EngineConfig(model=str(DEMO), tensor=2, context_length=1 << 17)
    assert plan_memory_bytes(config) > 2 * 12 * config.max_running_requests * (1 << 17) // config.page_size
    assert plan_memory_bytes(EngineConfig(model=str(DEMO), tensor=2)) == CAPACITY


def test_between_machines_keys_are_needed() -> None:
    config = EngineConfig(model=str(DEMO), tensor=2, nodes=2, ranks_address="192.0.2.1")
    with pytest.raises(UnsafeEndpoint, match="needs CURVE keys"):
        check_config(config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 3}, "--tensor 2 must be a multiple of --nodes 3"),
        ({"nodes": 2, "node_rank": 2}, "--node-rank 2 must be below --nodes 2"),
        ({"nodes": 2, "node_rank": 1}, "--node-rank 1 needs --leader-address"),
        ({"nodes": 2, "all_reduce": "fused"}, "--all-reduce fused only works within one machine"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(model=str(DEMO), tensor=2, **options)


def test_what_may_differ_is_no_difference() -> None:
    ours = EngineConfig(model=str(DEMO), tensor=2, nodes=2, threads=1)
    theirs = EngineConfig(
        model=str(DEMO), tensor=2, nodes=2, threads=2, node_rank=1, leader_address=LEADER, http_port=1
    )
    assert describe_differences(shared_settings(ours), shared_settings(theirs)) == []
    other = EngineConfig(model=str(DEMO), tensor=2, nodes=2, dtype="bfloat16")
    assert describe_differences(shared_settings(ours), shared_settings(other)) == [
        "--dtype (bfloat16 there, auto here)"
    ]

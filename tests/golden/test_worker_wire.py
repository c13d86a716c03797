# SPDX-License-Identifier: Apache-2.0
"""Golden bytes of everything that processes of the worker send each other.

Fields of messages are filled by type and position, so the bytes do not depend on field names. Only what a
peer of another version would decode is pinned.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import typing
from typing import Any

import msgspec
import numpy as np
import zmq
from golden_files import check, load

import mizzen.wire
from message_samples import filled, least
from mizzen.core.outputs import StepOutput
from mizzen.core.request import FinishReason, Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan
from mizzen.server import status_block as status_module
from mizzen.server.ranks import heartbeat as heartbeat_module
from mizzen.server.serving_loop import ControlCommand
from mizzen.wire import codec, columns, messages
from mizzen.wire.client import stream
from mizzen.wire.ranks import node_messages, plan_encoding, plan_ring, plan_tcp
from mizzen.wire.server.request_table import RequestTable

LOCAL = {stream.TokenLogprobs}
"""Structs of the wire package that are never sent."""


def wire_structs() -> list[type[msgspec.Struct]]:
    """Return all structs that modules of the wire package define, except base classes without fields."""
    structs = {}
    for module in pkgutil.walk_packages(mizzen.wire.__path__, "mizzen.wire."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.name:
                structs[kind] = None
    return [kind for kind in structs if kind not in LOCAL and msgspec.structs.fields(kind)]


def label(kind: type[msgspec.Struct]) -> str:
    """Return the name of a struct in the golden file: its tag, or its number of fields if it has no tag."""
    config = kind.__struct_config__
    family = "nodes" if kind.__module__ == node_messages.__name__ else "messages"
    return (
        f"{family} {config.tag}" if config.tag else f"{family} part of {len(kind.__struct_fields__)} fields"
    )


def shown(value: Any) -> Any:
    """Return a decoded msgpack value as JSON, with bytes in hexadecimal."""
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, list):
        return [shown(part) for part in value]
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    return value


def encoded() -> dict[str, Any]:
    encodings: dict[str, Any] = {}
    for kind in wire_structs():
        for name, instance in (("filled", filled(kind)), ("least", least(kind))):
            content = msgspec.msgpack.encode(instance)
            key = f"{label(kind)}, {name}"
            assert key not in encodings, f"{key}: two structs of one name"
            encodings[key] = {"hex": content.hex(), "reads": shown(msgspec.msgpack.decode(content))}
    return encodings


def test_encoded_messages_are_unchanged() -> None:
    check("worker_wire_messages", encoded())


def test_golden_bytes_decode_to_the_messages() -> None:
    golden = load("worker_wire_messages")
    for kind in wire_structs():
        for name, instance in (("filled", filled(kind)), ("least", least(kind))):
            content = bytes.fromhex(golden[f"{label(kind)}, {name}"]["hex"])
            assert msgspec.msgpack.decode(content, type=kind) == instance


def test_both_ends_decode_the_golden_bytes_of_their_direction() -> None:
    golden = load("worker_wire_messages")
    for union, decoder in (
        (messages.ToEngine, codec.engine_decoder()),
        (messages.ToGateway, codec.gateway_decoder()),
        (node_messages.ToLeader, msgspec.msgpack.Decoder(node_messages.ToLeader).decode),
        (node_messages.ToNode, msgspec.msgpack.Decoder(node_messages.ToNode).decode),
    ):
        for kind in typing.get_args(union):
            read = decoder(bytes.fromhex(golden[f"{label(kind)}, filled"]["hex"]))
            assert read == filled(kind)
            assert type(read) is kind


def test_no_message_is_missing_from_the_golden_file() -> None:
    labels = {label(kind) for kind in wire_structs()}
    assert {key.rpartition(", ")[0] for key in load("worker_wire_messages")} == labels
    sent = (messages.ToEngine, messages.ToGateway, node_messages.ToLeader, node_messages.ToNode)
    assert {kind for union in sent for kind in typing.get_args(union)} <= set(wire_structs())


def plan() -> StepPlan:
    """Return a plan with non-empty arrays and all kinds of starts and chunks."""

    def ints(*values: int) -> Any:
        return np.array(values, np.int32)

    starts = (
        SlotStart(slot=3, length=17, sampling=SamplingParams(temperature=0.0), seed=0),
        SlotStart(
            slot=4,
            length=5,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            options=SlotOptions(
                tokens=ints(1, 2, 3),
                prompt_tokens=3,
                prompt_logprobs=2,
                prompt_logprobs_from=2,
                pooling=Pooling.MEAN,
            ),
        ),
        SlotStart(
            slot=5,
            length=6,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            options=SlotOptions(tokens=ints(9), prompt_tokens=1, pooling=Pooling.LAST),
        ),
    )
    return StepPlan(
        step=258,
        decode=ints(1, 2, 70000),
        decode_version=11,
        pages=PageWrites(ints(1, 2), ints(3, 4), ints(5, 65541)),
        starts=starts,
        prefill=(
            PrefillChunk(slot=3, start=17, tokens=ints(101, 102, 100000), last=False),
            PrefillChunk(slot=4, start=5, tokens=ints(7), last=True, pools=True),
        ),
    )


def same_plan(plan: StepPlan, decoded: StepPlan) -> bool:
    return plan_encoding.encode_plan(plan) == plan_encoding.encode_plan(decoded)


def empty_plan() -> StepPlan:
    return StepPlan(step=1, decode=np.empty(0, np.int32), decode_version=0, pages=PageWrites())


def ring_memory() -> str:
    """Send a plan and the end through a ring with two readers; return the ring's memory in hexadecimal."""
    handles = plan_ring.create_ring(2, 1024)
    try:
        writer = plan_ring.RingWriter(handles)
        writer.send(empty_plan())
        writer.end()
        content = os.pread(handles.memory, 1 << 16, 0)
    finally:
        handles.close()
    return content.rstrip(b"\0").hex()


def tcp_frames() -> dict[str, Any]:
    """Return the name of a rank on another pod, the first frame that it sends, and the frames it receives.

    The rank receives two frames: a plan and the end.
    """
    server = plan_tcp.PlanServer("tcp://127.0.0.1:*", None, [1])
    context = zmq.Context()
    rank = context.socket(zmq.DEALER)
    try:
        rank.linger = 0
        rank.identity = plan_tcp.rank_identity(1)
        rank.connect(server.endpoint)
        rank.send(plan_tcp.HERE)
        server.wait(30)
        server.send(empty_plan())
        server.end()
        frames = [rank.recv().hex() for _ in range(2) if rank.poll(30_000)]
    finally:
        rank.close()
        context.term()
        server.close()
    return {"name": plan_tcp.rank_identity(12).decode(), "greeting": plan_tcp.HERE.decode(), "frames": frames}


def test_encoded_plans_are_unchanged() -> None:
    check(
        "worker_wire_plans",
        {
            "plan": plan_encoding.encode_plan(plan()).hex(),
            "empty plan": plan_encoding.encode_plan(empty_plan()).hex(),
            "ring in shared memory, 2 readers": ring_memory(),
            "frames over TCP": tcp_frames(),
        },
    )


def test_golden_bytes_decode_to_the_plans() -> None:
    golden = load("worker_wire_plans")
    read = plan_encoding.decode_plan(bytes.fromhex(golden["plan"]))
    assert same_plan(read, plan())
    assert [start.options is None for start in read.starts] == [True, False, False]
    assert read.prefill[0].tokens.tolist() == [101, 102, 100000]
    assert same_plan(plan_encoding.decode_plan(bytes.fromhex(golden["empty plan"])), empty_plan())


def test_the_layout_of_shared_memory_and_control_pipes_is_unchanged() -> None:
    block = status_module.create_status_blocks(1)
    writer = status_module.StatusWriter(block, 0)
    for at in range(len(writer.values)):
        writer.values[at] = at + 0.5
    writer.set_text("äh")
    writer.publish()
    content = os.pread(block, status_module.BLOCK_BYTES + 1, 0)
    os.close(block)
    pulses = heartbeat_module.create_heartbeats(2)
    rank = heartbeat_module.HeartbeatWriter(pulses, 1)
    rank.mark_serving()
    rank.launched(7)
    rank.done(6)
    numbers = np.frombuffer(os.pread(pulses, 1 << 12, 0), np.float64).tolist()
    os.close(pulses)
    text = content.find("äh".encode())
    check(
        "worker_shared_memory",
        {
            "status block": {
                "bytes": len(content),
                "numbers": (text - 16) // 8,
                "text at": text,
                "header": content[:16].hex(),
                "sha256": hashlib.sha256(content).hexdigest(),
            },
            "pulses": [number if number != os.getpid() else "process" for number in numbers],
            "commands": {command.name: command.value.decode() for command in ControlCommand},
        },
    )


def test_packed_columns_of_outputs_are_unchanged() -> None:
    message = messages.Outputs(
        step=5,
        rids=np.array([1, 2**31], "<u4").tobytes(),
        offsets=np.array([3, 4], "<u4").tobytes(),
        tokens=np.array([7, 8, 9], "<i4").tobytes(),
        counts=np.array([1, 2], "<u2").tobytes(),
    )
    assert columns.unpack_columns(message) == ([1, 2**31], [3, 4], [1, 2], [7, 8, 9])
    table = RequestTable()
    rids = [table.add(owner=1, handle=handle, now=0.0) for handle in (1, 2**31)]
    output = StepOutput(
        step=5,
        rids=np.array(rids, np.int64),
        offsets=np.array([3, 4], np.int32),
        tokens=np.array([7, 8, 9], np.int32),
        counts=np.array([1, 2], np.int32),
        finished=(),
    )
    ((owner, packed),) = columns.pack_by_peer(output, table)
    assert owner == 1
    assert (packed.rids, packed.offsets, packed.tokens, packed.counts) == (
        message.rids,
        message.offsets,
        message.tokens,
        message.counts,
    )


def test_numbers_and_bounds_of_the_protocol_are_unchanged() -> None:
    check(
        "worker_wire_numbers",
        {
            "protocol": messages.PROTOCOL,
            "protocol between nodes": node_messages.PROTOCOL,
            "largest frame": messages.MAX_FRAME_BYTES,
            "part of a file": messages.FILE_PART_BYTES,
            "largest grammar": messages.MAX_GRAMMAR_BYTES,
            "refusal codes": {code.name: int(code) for code in messages.RefusalCode},
            "finish reasons": {reason.name: int(reason) for reason in FinishReason},
            "poolings": [pooling.value for pooling in Pooling],
        },
    )

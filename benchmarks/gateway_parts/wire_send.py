# SPDX-License-Identifier: Apache-2.0
"""Host time of the wire per step: sending the frames of a step's tokens, and polling for new frames.

Uses real sockets over loopback TCP; all gateways run in one other process. In each step, 1 % of the requests
finish, and as many are submitted. Times are CPU time of the engine's thread, because sending never waits.
Steps follow each other in bursts without pauses, because on a busy machine a thread that has slept finds cold
caches. The columns are:

    send      from the output of a step until its frames, including ends of requests, are in ZMQ's queues
    receive   receiving and validating the requests that replace finished ones
    idle      polling when no frames have arrived
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time

import numpy as np
import zmq

from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished, FinishReason
from mizzen.wire.codec import encode, gateway_decoder
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import PROTOCOL, Generate, Hello, Outputs, Sampling, Welcome
from mizzen.wire.server.engine_server import WireServer

GOAL = 60.0
RUNNING = 256
PEERS = (1, 2, 4)
CHURN = 0.01
BURST = 50
PROMPT = np.arange(1, 1025, dtype="<i4").tobytes()


def gateways(endpoint: str, peers: int, each: int) -> None:
    """Act as `peers` gateways, each with `each` running requests, until the process is killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    decode, poller = gateway_decoder(), zmq.Poller()
    handles: dict[zmq.Socket[bytes], int] = {}
    for number in range(peers):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        socket.send(encode(Hello(PROTOCOL, f"gateway-{number}")))
        for rid in range(each):
            socket.send(encode(Generate(rid, PROMPT, Sampling())))
        handles[socket] = each
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            message = decode(socket.recv())
            for _ in message.finished if isinstance(message, Outputs) else ():
                socket.send(encode(Generate(handles[socket], PROMPT, Sampling())))
                handles[socket] += 1


def measure(peers: int, steps: int) -> dict[str, list[float]]:
    """Return the microseconds of each step, by column; the first tenth of the steps is left out."""
    welcome = Welcome(PROTOCOL, "e", "i", "r", "m", "h", {}, 8192, 100_000, (2,), 16, RUNNING, False)
    limits = WireLimits(send_frames=100_000)
    server = WireServer("tcp://127.0.0.1:*", None, welcome, {}, max_waiting=10_000, limits=limits)
    process = multiprocessing.get_context("spawn").Process(
        target=gateways, args=(server.endpoint, peers, RUNNING // peers), daemon=True
    )
    process.start()
    laps: dict[str, list[float]] = {"send": [], "receive": [], "idle": []}
    rng, live, lengths = np.random.default_rng(1), [], {}
    try:
        while len(live) < RUNNING:
            server.wait(0.1)
            live += [request.rid for request in server.receive(0.0, 0).requests]
        for step in range(1, steps + 1):
            rids = np.array(live, dtype=np.int64)
            offsets = np.array([lengths.get(rid, 0) for rid in live], dtype=np.int32)
            tokens = rng.integers(0, 100_000, len(live), dtype=np.int32)
            ends = [rid for rid in live if rng.random() < CHURN]
            finished = tuple(
                Finished(
                    rid=rid,
                    reason=FinishReason.STOP,
                    prompt_tokens=1024,
                    cached_tokens=512,
                    output_tokens=lengths.get(rid, 0) + 1,
                    stop_token=2,
                )
                for rid in ends
            )
            output = StepOutput(
                step=step, rids=rids, offsets=offsets, tokens=tokens, counts=None, finished=finished
            )
            begin = time.thread_time()
            server.out.send(output, 1.0)
            laps["send"].append((time.thread_time() - begin) * 1e6)
            lengths = {rid: lengths.get(rid, 0) + 1 for rid in live if rid not in set(ends)}
            live = list(lengths)
            begin = time.thread_time()
            arrivals = server.receive(1.0, 0)
            lap = (time.thread_time() - begin) * 1e6
            laps["receive" if arrivals.requests else "idle"].append(lap)
            live += [request.rid for request in arrivals.requests]
            if step % BURST == 0:  # let the gateways catch up, and warm up again
                time.sleep(0.01)
                live += [request.rid for request in server.receive(1.0, 0).requests]
                _ = sum(range(20_000))
    finally:
        process.kill()
        process.join()
        server.close()
    return {key: values[len(values) // 10 :] for key, values in laps.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    print(f"{RUNNING} running: microseconds of CPU a step; the goal of send is {GOAL:.0f}")
    print(f"{'gateways':>8}{'send':>9}{'p99':>9}{'of goal':>9}{'receive':>9}{'idle':>9}")
    for peers in PEERS:
        laps = measure(peers, args.steps)
        median = {key: float(np.median(values)) for key, values in laps.items()}
        worst = float(np.percentile(laps["send"], 99))
        figures[str(peers)] = {"send_us": median["send"], "send_p99_us": worst} | {
            f"{key}_us": median[key] for key in ("receive", "idle")
        }
        share = median["send"] / GOAL
        print(
            f"{peers:>8}{median['send']:>9.1f}{worst:>9.1f}{share:>9.0%}"
            f"{median['receive']:>9.1f}{median['idle']:>9.1f}"
        )
    if args.json:
        print(json.dumps({"goal_us": GOAL, "running": RUNNING, "gateways": figures}))


if __name__ == "__main__":
    main()

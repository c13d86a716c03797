# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks as threads of this process, with gloo between them and plans sent as bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mizzen.core.request import Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import StepPlan
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.execution.tp_worker import FollowerRanks
from mizzen.engine.loading.loader import load_engine, load_follower
from mizzen.parallel.collectives import GlooCollectives
from mizzen.parallel.process_group import RankConfig, RankGroup
from mizzen.wire.ranks.plan_encoding import decode_plan, encode_plan

SECONDS = 120.0


class ThreadGroup(RankGroup):
    """The process group of one rank; every rank is a thread."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.config = RankConfig(
            rank=rank, size=size, rendezvous="", device=torch.device("cpu"), timeout_seconds=SECONDS
        )
        self.rank, self.size = rank, size
        self._failure_check = lambda: None
        self._exchanges = 0
        self._store = dist.PrefixStore("words", store)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=SECONDS))
        self.collectives = GlooCollectives(gloo)

    def close(self) -> None:
        pass


class PlanQueues:
    """A plan channel that sends encoded plans to each other rank through a queue."""

    def __init__(self, readers: int) -> None:
        self.queues: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(readers)]
        self.plans_sent = 0

    def send(self, plan: StepPlan) -> None:
        self.plans_sent += 1
        for plans in self.queues:
            plans.put(encode_plan(plan))

    def end(self) -> None:
        for plans in self.queues:
            plans.put(b"")


class QueueReceiver:
    def __init__(self, plans: queue.Queue[bytes]) -> None:
        self.plans = plans
        self.ended = False

    def receive(self, seconds: float) -> StepPlan | None:
        try:
            frame = self.plans.get(timeout=seconds)
        except queue.Empty:
            return None
        self.ended = not frame
        return decode_plan(frame) if frame else None


class NoHeartbeat:
    def ping(self) -> None: ...

    def launched(self, step: int) -> None: ...

    def done(self, step: int) -> None: ...


@contextmanager
def thread_ranks(folder: Path, size: int, **settings: Any) -> Iterator[Engine]:
    """Load a model on `size` ranks; yield rank 0's engine."""
    options = EngineOptions(
        model=str(folder), device="cpu", threads=1, tensor=size, page_size=4, kv_cache_tokens=2048, **settings
    )
    store, plans, failures = dist.HashStore(), PlanQueues(size - 1), []

    def follow(rank: int) -> None:
        try:
            follower = load_follower(options, lambda: ThreadGroup(rank, size, store))
            follower.run_plans(QueueReceiver(plans.queues[rank - 1]), NoHeartbeat())
            follower.close()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    followers = (
        FollowerRanks(join_group=lambda: ThreadGroup(0, size, store), plans=plans, heartbeat=NoHeartbeat())
        if size > 1
        else None
    )
    engine = load_engine(options, followers=followers)
    try:
        yield engine
    finally:
        engine.close()
        for thread in threads:
            thread.join(SECONDS)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def compute_vector(engine: Engine, prompt: np.ndarray) -> np.ndarray:
    """Return the embedding of a prompt, which is a normalised hidden state of the last layer."""
    sampling = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(Request(rid=0, prompt=prompt, sampling=sampling, pooling=Pooling.LAST))
    vectors: list[np.ndarray] = []
    for step in range(20):
        output = engine.step(float(step))
        vectors += [item.vector for item in output.side_outputs.vectors] if output is not None else []
        if vectors:
            return vectors[0]
    raise AssertionError("the request has no result")

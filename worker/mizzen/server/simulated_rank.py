"""The rank process of a simulated engine, and how its engine is made from a model folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mizzen.core.output import CacheEvents, Load, StepOutput
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.server.engine_api import Engine
from mizzen.server.files import ModelFolderError
from mizzen.server.rank import Report, main
from mizzen.server.simulate import SimulateConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedInfo:
    """What a model folder says about its model, without weights."""

    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    page_size: int


def read_info(config: SimulateConfig) -> SimulatedInfo:
    """Read a model folder's sizes; a folder without config.json gets those of its tokenizer.

    Raises:
        ModelFolderError: neither file tells the size of the vocabulary.
    """
    folder = Path(config.model)
    model, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    vocab = model.get("vocab_size") or _tokenizer_size(folder)
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    context = config.context_length or model.get("max_position_embeddings") or 32_768
    capacity = config.kv_cache_tokens or context
    return SimulatedInfo(
        context_length=min(context, capacity),
        vocab_size=vocab,
        end_token_ids=ends,
        page_size=config.page_size,
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _tokenizer_size(folder: Path) -> int:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder} holds neither config.json nor tokenizer.json")
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path)).get_vocab_size()


def reply_tokens(config: SimulateConfig, info: SimulatedInfo) -> tuple[int, ...]:
    """Return the ids of the configured reply and an end token; empty when there is none."""
    if not config.reply:
        return ()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(config.model) / "tokenizer.json"))
    return (*tokenizer.encode(config.reply, add_special_tokens=False).ids, *info.end_token_ids[:1])


class _Running:
    def __init__(self, request: Request, limit: int) -> None:
        self.request = request
        self.limit = limit
        self.given = 0


class ScriptedEngine(Engine):
    """Answers requests from a script, a step at a time."""

    def __init__(self, config: SimulateConfig, info: SimulatedInfo) -> None:
        self.info = info
        self._config = config
        self._reply = reply_tokens(config, info)
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, _Running] = {}
        self._ended: list[Finished] = []
        self._step = 0
        self._given = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        self._waiting[request.rid] = request

    def abort(self, rid: int) -> None:
        running = self._running.pop(rid, None)
        request = self._waiting.pop(rid, None)
        if running:
            self._ended.append(self._finished(running, FinishReason.ABORT))
        elif request:
            self._ended.append(self._finished(_Running(request, 1), FinishReason.ABORT))

    def step(self, now: float) -> StepOutput | None:
        config = self._config
        prefill = 0
        while self._waiting and len(self._running) < config.max_running_requests:
            rid = next(iter(self._waiting))
            request = self._waiting.pop(rid)
            room = self.info.context_length - len(request.prompt)
            self._running[rid] = _Running(request, min(request.sampling.max_tokens or room, room))
            prefill += len(request.prompt)
        time.sleep((config.step_milliseconds + prefill * config.prefill_microseconds / 1000) / 1000)
        self._step += 1
        rows = list(self._running.items())
        tokens = [self._token(running) for _, running in rows]
        offsets = [running.given for _, running in rows]
        finished = []
        for (rid, running), token in zip(rows, tokens, strict=True):
            running.given += 1
            sampling = running.request.sampling
            stops = token in sampling.stop_token_ids or (
                not sampling.ignore_eos and token in self.info.end_token_ids
            )
            if stops or running.given >= running.limit:
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                finished.append(self._finished(running, reason, token if stops else None))
                del self._running[rid]
        self._given += len(rows)
        self._fail()
        return StepOutput(
            step=self._step,
            rids=np.array([rid for rid, _ in rows], dtype=np.int64),
            offsets=np.array(offsets, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32),
            counts=None,
            finished=tuple(finished),
        )

    def take_ended(self) -> tuple[Finished, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def take_cache_events(self) -> CacheEvents:
        return CacheEvents()

    def load(self) -> Load:
        waiting = sum(len(request.prompt) for request in self._waiting.values())
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=waiting,
            pages_total=1,
            pages_used=0,
            pages_cached=0,
        )

    def close(self) -> None:
        pass

    def _token(self, running: _Running) -> int:
        if self._reply:
            return self._reply[running.given % len(self._reply)]
        return (int(running.request.prompt[-1]) + running.given + 1) % self.info.vocab_size

    def _finished(self, running: _Running, reason: FinishReason, stop: int | None = None) -> Finished:
        return Finished(
            rid=running.request.rid,
            reason=reason,
            prompt_tokens=len(running.request.prompt),
            cached_tokens=0,
            output_tokens=running.given,
            stop_token=stop,
        )

    def _fail(self) -> None:
        config = self._config
        if 0 < config.die_after_tokens <= self._given:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < config.hang_after_tokens <= self._given:
            time.sleep(1e6)


def load_simulated(config: SimulateConfig, report: Report) -> Engine:
    """Make a simulated engine, in the time and with the failure that its configuration asks for."""
    report("weights")
    time.sleep(config.start_seconds)
    if config.fail_start:
        raise RuntimeError(config.fail_start)
    return ScriptedEngine(config, read_info(config))


def import_simulated() -> Callable[[SimulateConfig, Report], Engine]:
    """Import nothing heavy."""
    return load_simulated


if __name__ == "__main__":
    sys.exit(main(SimulateConfig, import_simulated))

# SPDX-License-Identifier: Apache-2.0
"""Rank process of a simulated engine, and the function that builds the simulated engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from mizzen.common.model_task import Task, default_activation
from mizzen.core.config import SchedulerConfig
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan
from mizzen.engine.engine import Engine
from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.pending import ImageServices
from mizzen.engine.info import EngineInfo
from mizzen.engine.simulated.engine import (
    Script,
    ScriptContext,
    StepDuration,
    fixed,
    hashed,
    make_simulated_runner,
)
from mizzen.server.image_model import require_image_rules
from mizzen.server.model_files import ModelFolderError, read_tokenizer
from mizzen.server.ranks.leader import EngineLoader, StartupReporter, exit_process, main
from mizzen.server.ranks.links import RankLinks
from mizzen.server.simulate_config import SimulateConfig

KV_CACHE_TOKENS = 1 << 18
CONTEXT_LENGTH = 1 << 15
"""Context length if the model folder has no config.json that defines it."""
START_PARTS = 10
"""Number of progress reports while the simulated weights are loaded."""


def read_model_sizes(folder: Path) -> tuple[int, int, tuple[int, ...]]:
    """Return the vocabulary size, the context length in tokens and the end token ids of a model folder.

    Raises:
        ModelFolderError: neither config.json nor tokenizer.json contains the vocabulary size.
    """
    model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    vocab = model.get("vocab_size") or _load_tokenizer(folder).get_vocab_size()
    end_ids = generation.get("eos_token_id", model.get("eos_token_id"))
    end_tokens = () if end_ids is None else (end_ids,) if isinstance(end_ids, int) else tuple(end_ids)
    return vocab, model.get("max_position_embeddings") or CONTEXT_LENGTH, end_tokens


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _load_tokenizer(folder: Path) -> Any:
    content = read_tokenizer(folder)
    if content is None:
        raise ModelFolderError(f"{folder / 'tokenizer.json'} is missing")
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(content)


def build_script(config: SimulateConfig, vocab_size: int, end_tokens: tuple[int, ...]) -> Script:
    """Return the script that chooses output tokens: those of the configured reply or, without one, an endless
    sequence in which each token is a hash of the context."""
    if config.reply:
        tokenizer = _load_tokenizer(Path(config.model))
        ids = tokenizer.encode(config.reply, add_special_tokens=False).ids
        return fixed(ids, end_tokens[0] if end_tokens else ids[-1])
    choose = hashed(vocab_size)

    def endless(context: ScriptContext) -> int:
        token = choose(context)
        while token in end_tokens:
            token = (token + 1) % vocab_size
        return token

    return endless


class FaultInjector:
    """Makes a step fail, hang or kill the process once the configured number of tokens is reached.

    The thread of the simulated device calls it with every plan.
    """

    def __init__(self, config: SimulateConfig) -> None:
        self._config = config
        self._tokens = 0

    def __call__(self, plan: StepPlan) -> float:
        """Count the plan's tokens and trigger the fault if it is due; return 0.0 (no additional delay).

        Raises:
            RuntimeError: the number of tokens has reached `fail_after_tokens`.
        """
        config, self._tokens = self._config, self._tokens + plan.samples
        if 0 < config.die_after_tokens <= self._tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < config.fail_after_tokens <= self._tokens:
            raise RuntimeError(f"configured to fail after {config.fail_after_tokens} tokens")
        if 0 < config.hang_after_tokens <= self._tokens:
            threading.Event().wait()
        return 0.0


def load_simulated(config: SimulateConfig, reporter: StartupReporter) -> Engine:
    """Build a simulated engine; take the configured startup time, or fail as configured.

    Raises:
        RuntimeError: the configuration's `fail_start` is set.
        ValueError: the model folder or an option is invalid.
    """
    reporter.begin_phase("config")
    vocab_size, context_length, end_tokens = read_model_sizes(Path(config.model))
    reporter.begin_phase("weights")
    for part in range(START_PARTS):
        reporter.report_progress(part, START_PARTS)
        time.sleep(config.start_seconds / START_PARTS)
    if config.fail_start:
        raise RuntimeError(config.fail_start)
    reporter.begin_phase("kv")
    scheduling = SchedulerConfig(
        pages_total=max(1, (config.kv_cache_tokens or KV_CACHE_TOKENS) // config.page_size),
        context_length=config.context_length or context_length,
        end_token_ids=end_tokens,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_step_milliseconds=config.max_step_milliseconds,
        steps_in_flight=config.steps_in_flight,
        prefix_cache=config.prefix_cache,
        eviction=config.eviction,
        policy=config.policy,
        check_integrity=config.check_integrity,
        image_capacity=config.image_capacity,
    )
    images = (
        ImageServices(require_image_rules(Path(config.model)), ImageDecoder())
        if config.image_capacity
        else None
    )
    runner = make_simulated_runner(
        slots=config.max_running_requests,
        pages=scheduling.pages_total,
        page_size=config.page_size,
        context_length=scheduling.capacity_tokens,
        script=build_script(config, vocab_size, end_tokens),
        vocab_size=vocab_size,
        labels=len(config.label_names),
        image_capacity=config.image_capacity,
        duration=StepDuration(
            step_seconds=config.step_milliseconds / 1e3,
            seconds_per_prefill_token=config.prefill_token_microseconds / 1e6,
        ),
        delay=FaultInjector(config),
    )
    info = EngineInfo(
        context_length=scheduling.capacity_tokens,
        vocab_size=vocab_size,
        end_token_ids=end_tokens,
        page_size=config.page_size,
        pages_total=scheduling.pages_total,
        weights_bytes=0,
        kv_bytes=0,
        dtype="none",
        device="simulated",
        task=Task(config.task),
        labels=config.label_names,
        score_activation=default_activation(len(config.label_names)),
        images=images is not None,
    )
    return Engine(info, Scheduler(scheduling), runner, images=images)


def import_simulated(links: RankLinks | None) -> EngineLoader[SimulateConfig]:
    """Return `load_simulated`; a simulated engine needs no slow imports and has no other ranks."""
    return load_simulated


if __name__ == "__main__":
    exit_process(main(SimulateConfig, import_simulated))

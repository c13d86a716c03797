# SPDX-License-Identifier: Apache-2.0
"""A model on several ranks, as threads or processes, samples the same tokens as on one rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rank_kit import thread_ranks

import family_twins
from family_twins import SHARDED_OTHERS, save_other_twin
from live_processes import is_alive
from mizzen import LLM, SamplingParams
from mizzen.core.request import Finished, FinishReason, Pooling, Request
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.engine import Engine
from mizzen.engine.loading.memory_budget import MemoryShortage, min_pages_over_ranks
from mizzen.engine.loading.placement import cpus_near, parse_cpu_list
from mizzen.engine.overlap_loop import StepFailed
from mizzen.layers.sharding import Axis
from mizzen.models.config import ModelConfig
from mizzen.models.families import ernie, phi3
from mizzen.models.registry import READERS
from mizzen.models.transformers_backend import inspection

VOCABULARY = 157
"""Size of the vocabulary; a prime number, so that the last rank's rows are padded."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 1, "min_tokens": 3},
]


def requests(tokens: int = 12) -> list[Request]:
    """Return requests that generate `tokens` tokens, and requests that pool their prompts."""
    rng = np.random.default_rng(0)
    new_requests = [
        Request(
            rid=rid,
            prompt=rng.integers(3, VOCABULARY, int(rng.integers(1, 60))).astype(np.int32),
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, **KINDS[rid % len(KINDS)]),
            seed=100 + rid,
        )
        for rid in range(10)
    ]
    vectors = SamplingParams(temperature=0, max_tokens=1)
    for pooling in Pooling:
        prompt = rng.integers(3, VOCABULARY, 40).astype(np.int32)
        new_requests.append(Request(rid=len(new_requests), prompt=prompt, sampling=vectors, pooling=pooling))
    return new_requests


def run(engine: Engine, requests: list[Request], abort: set[int] = frozenset()) -> dict[int, Any]:  # type: ignore[assignment]
    """Run requests and abort some; return the tokens, logprobs and embedding of each, by request id.

    Logprobs and embeddings are rounded. The result of an aborted request is None. Requests with odd ids are
    submitted a few steps later than the others.
    """
    # Timing decides how steps divide a prompt into chunks, so the results of its chunks are joined.
    results: dict[int, Any] = {request.rid: ([], [], []) for request in requests}
    ends: dict[int, Finished] = {}
    step = 0
    while engine.busy or step == 0:
        for request in requests:
            if step == 3 * (request.rid % 2):
                engine.submit(request)
        if step == 6:
            for rid in abort:
                engine.abort(rid)
        output = engine.step(float(step))
        step += 1
        if output is not None:
            for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                results[rid][0].append(token)
            for item in output.side_outputs.logprobs:
                results[item.rid][1].extend(np.round(item.values, 2).tolist())
            for item in output.side_outputs.vectors:
                results[item.rid][2].extend(np.round(item.vector, 2).tolist())
            ends |= {end.rid: end for end in output.finished}
        ends |= {end.rid: end for end in engine.drain_finished()}
        engine.drain_cache_events()
    assert set(ends) == set(results)
    assert engine.integrity_faults == 0
    return {rid: None if rid in abort else results[rid] for rid in results}


CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", CASES)
def test_answers_on_several_ranks_equal_those_on_one(
    family: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_model(tmp_path, family, **SHAPE | CASES[family])
    requested = requests()
    with thread_ranks(tmp_path, 1, prefill_chunk_tokens=32, check_integrity=True) as engine:
        alone = run(engine, requested)
    for ranks in (2, 4, 8) if family == "qwen3" else (2, 4):
        # Eight threads on a few CPU cores are slow, so they run only one family and one request of each kind.
        chosen_requests = requested if ranks < 8 else [*requested[: len(KINDS)], requested[-1]]
        with thread_ranks(tmp_path, ranks, prefill_chunk_tokens=32, check_integrity=True) as engine:
            assert run(engine, chosen_requests) == {
                request.rid: alone[request.rid] for request in chosen_requests
            }, ranks


TWINS = (
    *("apertus", "cohere", "cohere2", "ernie4.5", "exaone4", "gemma2", "gemma3", "glm", "glm4"),
    *(
        "granite-biases",
        "granite4",
        "hunyuan",
        "ministral3",
        "nemotron",
        "olmo2",
        "olmo3",
        "phi3",
        "seed-oss",
    ),
    *("smollm3", "starcoder2"),
    *("ernie4.5-moe", "glm4-moe", "gpt-oss", "granite-moe", "minimax-m2", "mixtral", "olmoe", "qwen2-moe"),
    *("phi3.5-moe", "qwen3-moe"),
)


def test_every_native_architecture_is_compared_on_several_ranks() -> None:
    """docs/models.md says that answers on several ranks are compared for every architecture."""
    compared = {f"{family.capitalize()}ForCausalLM" for family in CASES}
    compared |= {f"{family_twins.TWINS[twin][0]}ForCausalLM" for twin in TWINS}
    assert compared | {ernie.OLD_ARCHITECTURE, phi3.OLD_MOE} == set(READERS)


@pytest.mark.parametrize("twin", TWINS)
def test_each_kind_of_block_answers_the_same_on_several_ranks(
    twin: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """With two KV heads, ranks share KV heads if there are four ranks."""
    kit.save_twin(tmp_path, twin, **SHAPE, hidden_size=64)
    requested, alone = [*requests(6)[:3], requests()[-1]], {}
    for ranks in (1, 2, 4):
        with thread_ranks(tmp_path, ranks, prefill_chunk_tokens=32, check_integrity=True) as engine:
            results = run(engine, requested)
            alone = alone or results
            assert results == alone, ranks


@pytest.mark.parametrize("prefix", SHARDED_OTHERS)
def test_models_of_transformers_answer_the_same_on_several_ranks(prefix: str, tmp_path: Path) -> None:
    """With two KV heads, ranks share KV heads if there are four ranks."""
    save_other_twin(tmp_path, prefix, **SHAPE, hidden_size=64)
    requested, alone = [*requests(6)[:3], requests()[-1]], {}
    for ranks in (1, 2, 4):
        with thread_ranks(tmp_path, ranks, prefill_chunk_tokens=32, check_integrity=True) as engine:
            assert engine.info.implementation == "transformers"
            results = run(engine, requested)
            alone = alone or results
            assert results == alone, ranks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_rank_inspects_a_model_of_transformers_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inspected: list[int] = []
    inspect = inspection.inspect_model

    def count(folder: Path, config: ModelConfig, dtype: torch.dtype, ranks: int) -> ModelConfig:
        inspected.append(ranks)
        return inspect(folder, config, dtype, ranks)

    monkeypatch.setattr(inspection, "inspect_model", count)
    save_other_twin(tmp_path, SHARDED_OTHERS[0], **SHAPE, hidden_size=64)
    with thread_ranks(tmp_path, 2) as engine:
        assert run(engine, requests()[:1])
    assert inspected == [2]
    save_other_twin(tmp_path, "OPT")
    with pytest.raises(ValueError, match="has no tensor parallel plan"), thread_ranks(tmp_path, 2):
        pass
    assert inspected == [2, 2]


@pytest.mark.parametrize("twin", ["olmo2", "phi3"])
def test_plans_that_gather_projections_answer_the_same_on_two_ranks(
    twin: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """OLMo 2 normalises all queries together, and Phi-3 has one projection for queries, keys, values."""
    kit.save_twin(tmp_path, twin, **SHAPE, hidden_size=64)
    requested, alone = requests(6)[:3], {}
    for ranks in (1, 2):
        with thread_ranks(tmp_path, ranks, model_implementation="transformers") as engine:
            results = run(engine, requested)
            alone = alone or results
            assert results == alone, ranks


def test_three_ranks_stay_consistent_when_requests_are_aborted(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "qwen3", vocab_size=VOCABULARY, num_attention_heads=6, num_key_value_heads=1)
    results = {}
    for ranks in (1, 3):
        settings = {"max_running_requests": 3, "prefill_chunk_tokens": 16, "check_integrity": True}
        with thread_ranks(tmp_path, ranks, **settings) as engine:
            results[ranks] = run(engine, requests(), abort={1, 4, 7})
    assert results[3] == results[1]


def test_dummy_weights_of_ranks_form_one_model(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama", **SHAPE)
    (tmp_path / "model.safetensors").unlink()
    results = {}
    for ranks in (1, 2):
        with thread_ranks(tmp_path, ranks, load_format="dummy") as engine:
            results[ranks] = run(engine, requests()[:3])
    assert results[2] == results[1]


def test_grammars_constrain_output_on_several_ranks() -> None:
    demo = Path(__file__).parents[3] / "models" / "demo"
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}")
    sampling = SamplingParams(temperature=1.0, max_tokens=20, grammar=grammar)
    tokens_by_ranks = {}
    for ranks in (1, 2):
        with thread_ranks(demo, ranks) as engine:
            prompt = np.arange(10, 20, dtype=np.int32)
            requested = [Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid) for rid in range(3)]
            for request in requested:
                engine.submit(request)
            tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
            ends: list[Finished] = []
            while engine.busy:
                output = engine.step(time.monotonic())
                if output is not None:
                    ends += output.finished
                    for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                        tokens[rid].append(token)
                ends += engine.drain_finished()
            assert [end.reason for end in ends] == [FinishReason.STOP] * 3
            tokens_by_ranks[ranks] = tokens
    assert tokens_by_ranks[2] == tokens_by_ranks[1]


def followers() -> list[psutil.Process]:
    """Return the follower processes of this process that are still running."""
    results = [child for child in psutil.Process().children() if is_alive(child)]
    return [child for child in results if "mizzen.server.ranks.follower" in child.cmdline()]


def test_each_follower_rank_is_a_process(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "qwen3", vocab_size=VOCABULARY, num_attention_heads=12, num_key_value_heads=6)
    prompts = [kit.tokens(length, length, VOCABULARY).tolist() for length in (3, 20, 50)]
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=10, ignore_eos=True)
    answers = {}
    for ranks in (1, 2, 3):
        with LLM(tmp_path, device="cpu", tensor=ranks, skip_tokenizer=True, kv_cache_tokens=1024) as llm:
            answers[ranks] = [answer.token_ids for answer in llm.generate(prompts, params)]
            follower_processes = followers()
            assert len(follower_processes) == ranks - 1
        assert not any(process.is_running() for process in follower_processes)
    assert answers[3] == answers[2] == answers[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_rank_fails_the_engine(
    number: signal.Signals, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mizzen.server.ranks.in_process.RANK_DEADLINE_SECONDS", 3.0)
    kit.save_model(tmp_path, "llama", **SHAPE)
    llm = LLM(tmp_path, device="cpu", tensor=2, skip_tokenizer=True, kv_cache_tokens=1024)
    (follower,) = followers()
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm.engine.submit(Request(rid=1, prompt=kit.tokens(5), sampling=sampling))
    llm.engine.step(0.0)
    os.kill(follower.pid, number)
    why = "exited unexpectedly with code -9" if number == signal.SIGKILL else "has not run for"
    with pytest.raises(StepFailed, match=rf"rank 1 .*{why}"):
        while True:
            llm.engine.step(0.0)
    assert not follower.is_running()
    llm.close()


def test_a_rank_that_cannot_start_reports_the_reason(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama", **SHAPE)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        LLM(tmp_path, device="cpu", tensor=2, skip_tokenizer=True)
    assert not followers()


@pytest.mark.parametrize(
    ("total", "ranks", "rule"),
    [
        (14, 4, r"heads \(14\) must be a multiple of the tensor ranks \(4\): use --tensor 1 or 2$"),
        (28, 8, r"heads \(28\) must be a multiple of the tensor ranks \(8\): use --tensor 1 or 2 or 4$"),
    ],
)
def test_errors_name_heads_that_ranks_do_not_divide(total: int, ranks: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Axis(0, ranks).shard(total, "heads")


def test_ranks_share_kv_heads_if_there_are_fewer_heads_than_ranks() -> None:
    assert [Axis(rank, 8).replicated_shard(2, "heads") for rank in (0, 3, 4, 7)] == [
        slice(0, 1),
        slice(0, 1),
        slice(1, 2),
        slice(1, 2),
    ]
    with pytest.raises(ValueError, match=r"heads \(3\), being fewer than the tensor ranks \(8\), must"):
        Axis(0, 8).replicated_shard(3, "heads")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [1, 7, 8, 157, 160])
def test_padded_shards_cover_every_row_once(total: int, ranks: int) -> None:
    shards = [Axis(rank, ranks).padded_shard(total, 8) for rank in range(ranks)]
    retained = [index for _, rows in shards for index in range(rows.start, rows.stop)]
    assert retained == list(range(total))
    assert len({shard_rows for shard_rows, _ in shards}) == 1
    assert all(
        rank * shard_rows == rows.start
        for rank, (shard_rows, rows) in enumerate(shards)
        if rows.stop > rows.start
    )


def test_ranks_use_the_minimum_of_pages_and_reject_uneven_memory() -> None:
    gib = 1 << 30
    assert min_pages_over_ranks([100, 90, 95], [80 * gib, 73 * gib, 80 * gib]) == 90
    with pytest.raises(MemoryShortage, match=r"10%.*rank 0 80.00 GiB, rank 1 71.00 GiB"):
        min_pages_over_ranks([100, 90], [80 * gib, 71 * gib])
    assert min_pages_over_ranks([100, 40], None) == 40


def test_cpus_next_to_a_device_are_read_from_linux(tmp_path: Path) -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") == parse_cpu_list("all") == set()
    (tmp_path / "0000:1a:00.0").mkdir()
    (tmp_path / "0000:1a:00.0" / "local_cpulist").write_text("4-5\n")
    assert cpus_near("0000:1a:00.0", tmp_path) == {4, 5}
    assert cpus_near("0000:1b:00.0", tmp_path) == set()

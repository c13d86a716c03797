"""A model on several GPUs: the tokens of one, whatever the batch, and a quick end when a rank is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from small_models import FAMILIES, save_model

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request
from mizzen.parallel.device import WAYS

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
RANKS = [size for size in (2, 4, 8) if size <= GPUS]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
]
VOCABULARY = 512
ALLREDUCE = Path(__file__).parents[2] / "benchmarks/allreduce.py"
SMALL: dict[str, Any] = {"skip_tokenizer": True, "kv_cache_tokens": 8192, "max_running_requests": 32}


def asked(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of every kind: greedy, drawn, filtered, penalised, with log probabilities."""
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.9, "seed": 8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.6, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    prompts = [rng.integers(3, VOCABULARY, int(rng.integers(1, 200))).tolist() for _ in range(count)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(count)]
    return prompts, params


class Alone:
    """What one GPU answers, by family; each is asked once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: dict[str, list[list[int]]] = {}

    def model(self, family: str) -> Path:
        """Return where the family's model lies."""
        folder = self.folder / family
        if not folder.exists():
            folder.mkdir()
            save_model(folder, family)
        return folder

    def __getitem__(self, family: str) -> list[list[int]]:
        """Return the tokens of each request."""
        if family not in self.tokens:
            self.tokens[family] = tokens_of(self.model(family))
        return self.tokens[family]


def tokens_of(model: Path, **options: Any) -> list[list[int]]:
    """Return what is generated for each request in float32, by a new process: later groups go by NCCL."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(generated, model, options).result()


def generated(model: Path, options: dict[str, Any]) -> list[list[int]]:
    """Return what is generated for each request, here."""
    prompts, params = asked(12)
    with LLM(model, device="cuda", dtype="float32", **SMALL, **options) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Tokens of one GPU, to compare with."""
    return Alone(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_tokens_of_one(family: str, size: int, alone: Alone) -> None:
    if size > 4:
        pytest.skip("the small model has four heads")
    assert tokens_of(alone.model(family), tensor=size) == alone[family]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "auto"])
@pytest.mark.parametrize("size", RANKS[:2])
def test_every_way_of_all_reduce_gives_the_same_tokens(size: int, way: str, alone: Alone) -> None:
    assert tokens_of(alone.model("qwen3"), tensor=size, all_reduce=way) == alone["qwen3"]


def test_a_process_can_have_one_group_after_another(alone: Alone) -> None:
    for _ in range(2):
        assert generated(alone.model("qwen3"), {"tensor": 2}) == alone["qwen3"]


@pytest.mark.parametrize("size", RANKS[:2])
def test_fused_sums_are_those_of_plain_operations(size: int) -> None:
    """Kernels of bfloat16, which the float32 models above have no use for."""
    command = [sys.executable, str(ALLREDUCE), "--ranks", str(size), "--part", "check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr


def real_shape(folder: Path) -> None:
    """Write a config.json as wide as Qwen3-8B, with few layers."""
    transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=2,
        dtype="bfloat16",
    ).save_pretrained(folder)


@pytest.mark.parametrize("size", RANKS)
def test_log_probabilities_on_real_shapes_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    real_shape(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 150000, length).tolist() for length in (1, 7, 64, 500, 1000)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found: dict[int, list[np.ndarray]] = {}
    for ranks in (1, size):
        with LLM(
            tmp_path,
            device="cuda",
            tensor=ranks,
            load_format="dummy",
            **{**SMALL, "kv_cache_tokens": 1 << 15},
        ) as llm:
            answers = llm.generate(prompts, params)
        found[ranks] = [
            np.array([entry.logprob for entry in answer.prompt_logprobs or []]) for answer in answers
        ]
    for one, many in zip(found[1], found[size], strict=True):
        # Sums in another order, rounded to bfloat16 four times a layer.
        np.testing.assert_allclose(many, one, atol=0.15)


def test_random_load_with_aborts_leaves_nothing_behind(tmp_path: Path) -> None:
    seconds = float(os.environ.get("MIZZEN_LOAD_SECONDS", "20"))
    save_model(tmp_path, "qwen3")
    rng = np.random.default_rng(11)
    options = {**SMALL, "check_integrity": True, "kv_cache_tokens": 4096, "prefill_chunk_tokens": 256}
    with LLM(tmp_path, device="cuda", tensor=2, **options) as llm:
        engine, end, rid, live = llm.engine, time.monotonic() + seconds, 0, set()
        _, kinds = asked(5)
        while time.monotonic() < end or engine.busy:
            while time.monotonic() < end and len(live) < 40:
                rid += 1
                prompt = rng.integers(3, VOCABULARY, int(rng.integers(1, 400))).astype(np.int32)
                engine.submit(Request(rid=rid, prompt=prompt, sampling=kinds[rid % 5], seed=rid))
                live.add(rid)
            if live and rng.random() < 0.2:
                engine.abort(int(rng.choice(sorted(live))))
            output = engine.step(time.monotonic())
            ended = [*(output.finished if output else ()), *engine.take_ended()]
            live -= {finished.rid for finished in ended}
            engine.take_cache_events()
        assert not live
        engine.step(time.monotonic())
        assert engine.integrity_faults == 0
        assert rid > 100


GONE = """
import os, sys, time
import numpy as np, psutil
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request
from mizzen.engine.loop import StepFailed

llm = LLM(sys.argv[1], device="cuda", tensor=2, skip_tokenizer=True, kv_cache_tokens=8192)
children = psutil.Process().children()
(follower,) = (child for child in children if "mizzen.server.follower" in child.cmdline())
for rid in range(8):
    sampling = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    llm.engine.submit(Request(rid=rid, prompt=np.arange(3, 20, dtype=np.int32), sampling=sampling))
for _ in range(20):
    llm.engine.step(time.monotonic())
began = time.monotonic()
follower.send_signal(int(sys.argv[2]))
try:
    while True:
        llm.engine.step(time.monotonic())
except StepFailed as error:
    print(f"{time.monotonic() - began:.1f} {error}", flush=True)
llm.close()
os._exit(int(follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE))
"""
"""In a process of its own: what is in flight on its GPU may never end."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_rest_within_ten_seconds(number: signal.Signals, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    command = [sys.executable, "-c", GONE, str(tmp_path), str(int(number))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    seconds, _, reason = run.stdout.strip().partition(" ")
    assert "rank 1" in reason
    assert float(seconds) < 12

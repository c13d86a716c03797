# SPDX-License-Identifier: Apache-2.0
"""`LLM`, the offline class: generation, chat, embeddings, errors and options."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import griffe
import pytest

from encoders.twins import save_encoder
from mizzen import LLM, SamplingParams
from mizzen.commands.options import settings
from mizzen.engine.config import EngineOptions
from mizzen.offline import llm as offline
from mizzen.offline.batch import STEPS_AHEAD, Batch
from mizzen.offline.requests import RequestBuilder

DEMO = Path(__file__).parents[2] / "models/demo"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
QUESTION = [{"role": "user", "content": "What is Mizzen?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, device="cpu", threads=1, kv_cache_tokens=8192) as loaded:
        yield loaded


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = ["A pod", "What is a gateway, and why is it there?", "x"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    by_text, by_ids = llm.generate(texts, GREEDY), llm.generate(ids, GREEDY)
    assert [a.token_ids for a in by_text] == [a.token_ids for a in by_ids]
    assert by_text == [llm.generate([text], GREEDY)[0] for text in texts]
    for completion in by_text:
        assert completion.finish_reason in ("stop", "length")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 16


def test_chat_gives_the_trained_answer(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(temperature=0))[0]
    assert answer.text.startswith("Mizzen serves language models on Kubernetes.")
    assert answer.finish_reason == "stop"
    assert llm.chat([QUESTION, QUESTION], SamplingParams(temperature=0))[1].text == answer.text


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    uncut = llm.chat(QUESTION, SamplingParams(temperature=0))[0]
    cut = llm.chat(QUESTION, SamplingParams(temperature=0, stop=("dels on Kub", "never")))[0]
    assert cut.text == uncut.text[: uncut.text.index("dels on Kub")]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(uncut.token_ids)
    assert not llm.engine.busy


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 7)]
    assert [len(a.token_ids) for a in llm.generate(["a", "b"], params)] == [3, 7]
    with pytest.raises(ValueError, match="2 for 1 prompts"):
        llm.generate(["a"], params)


def test_a_seed_reproduces_the_answer(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.5, seed=-7, max_tokens=12)
    first, second = llm.generate(["Kubernetes"] * 2, seeded)
    assert first.token_ids == second.token_ids
    free = llm.generate(["Kubernetes"] * 4, SamplingParams(temperature=1.5, max_tokens=12))
    assert len({tuple(answer.token_ids) for answer in free}) > 1


def test_answers_report_cached_tokens(llm: LLM) -> None:
    prompt = [[7 + i % 90 for i in range(100)]]
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 96


def test_more_prompts_than_the_waiting_queue_holds_are_answered(tmp_path: Path) -> None:
    with LLM(DEMO, device="cpu", threads=1, kv_cache_tokens=4096, max_waiting_requests=3) as llm:
        answers = llm.generate(["a"] * 11, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [2] * 11


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("a", GREEDY, "must be a list"),
        ([[]], GREEDY, "prompt 0 has 0 tokens"),
        ([[3], [3] * 3000], GREEDY, "prompt 1 has 3000 tokens; it must have 1 to 2047"),
        ([[3, 99999]], GREEDY, "prompt 0 holds ids outside the vocabulary"),
    ],
)
def test_invalid_prompts_raise_value_error(llm: LLM, prompts, params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.busy


def test_token_ids_work_without_a_tokenizer(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama")
    with LLM(tmp_path, device="cpu", threads=1, skip_tokenizer=True, kv_cache_tokens=512) as llm:
        answer = llm.generate([[5, 6, 7]], GREEDY)[0]
        assert answer.text == ""
        assert answer.token_ids
        with pytest.raises(ValueError, match="tokenizer is skipped"):
            llm.generate(["text"], GREEDY)
        with pytest.raises(ValueError, match="stop strings need the tokenizer"):
            llm.generate([[5]], SamplingParams(stop=("x",)))


def test_errors_name_unknown_options() -> None:
    for name, advice in (
        ("chunk", "did you mean prefill_chunk_tokens"),
        ("kv_cache_token", "did you mean kv_cache_tokens"),
        ("tensor_parallel_size", "write tensor=N"),
        ("enforce_eager", 'write cuda_graph="off"'),
        ("attention_backend", "write attention_prefill=NAME and attention_decode=NAME"),
        ("trust_remote_code", "code from a model's folder is never run"),
        ("nodes", "the arguments are model, skip_tokenizer, device"),
    ):
        message = f"unknown keyword arguments: {name}. '{name}': {re.escape(advice)}"
        with pytest.raises(TypeError, match=message):
            LLM(DEMO, device="cpu", **{name: 3})


def test_the_arguments_are_the_fields_of_the_options() -> None:
    """Names, types, defaults and descriptions are those of `EngineOptions`, with few exceptions."""
    parameters = inspect.signature(LLM.__init__).parameters
    hints = typing.get_type_hints(LLM.__init__)
    (parsed,) = [
        section.value
        for section in griffe.Docstring(inspect.getdoc(LLM.__init__) or "").parse("google")
        if section.kind is griffe.DocstringSectionKind.parameters
    ]
    described = {entry.name: " ".join(entry.description.split()) for entry in parsed}
    own = {"self", "model", "skip_tokenizer"}
    fields = {setting.name: setting for setting in settings(EngineOptions)}
    assert list(parameters)[3:] == [name for name in fields if name not in ("model", "nodes")]
    assert set(described) == set(parameters) - {"self"}
    for name, parameter in parameters.items():
        if name in own:
            continue
        setting, hint = fields[name], hints[name]
        expected = typing.Literal[setting.choices] if setting.choices else setting.kind
        chosen_later = name in ("device", "prefill_chunk_tokens")
        optional = setting.optional or chosen_later
        assert hint == (expected | None if optional else expected), name
        if name == "prefill_chunk_tokens":
            assert setting.default == offline.PREFILL_TOKENS
        elif name not in ("device", "max_step_milliseconds"):
            assert parameter.default == setting.default, name
        assert described[name].startswith(setting.help) or chosen_later, name
        assert described[name].startswith(setting.help.split(" ")[0]), name


def test_progress_bar_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"], GREEDY, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    llm.generate(["a"], GREEDY)
    assert capsys.readouterr().err == ""


def test_logprobs_match_their_tokens_after_a_stop_string(llm: LLM) -> None:
    cut = SamplingParams(temperature=0, stop=("dels on Kub",), logprobs=2, prompt_logprobs=1)
    answer = llm.chat(QUESTION, cut)[0]
    assert [entry.token for entry in answer.logprobs or []] == answer.token_ids
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in answer.logprobs or [])
    assert len(answer.prompt_logprobs or []) > 5


def test_embed_returns_one_vector_per_text(llm: LLM) -> None:
    texts = ["A pod", "A pod", "What is a gateway, and why is it there?"]
    for pooling in ("last", "mean"):
        first, repeated, different = llm.embed(texts, pooling=pooling)
        assert first.shape == (192,)
        assert abs(first - repeated).max() < 1e-5
        assert first @ different < 0.99
    assert llm.embed([]).shape == (0, 0)
    with pytest.raises(ValueError, match="pooling must be one of last, mean, cls, not 'max'"):
        llm.embed(texts, pooling="max")
    with pytest.raises(ValueError, match="prompts must be a list"):
        llm.embed("A pod")
    assert not llm.engine.busy


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many earlier prompts had no result when each prompt was prepared."""
    numbers: list[int] = []
    finished: list[int] = [0]
    build, step = RequestBuilder._token_ids, Batch._step

    def count(builder: RequestBuilder, index: int, prompt: Any) -> Any:
        numbers.append(index - finished[0])
        return build(builder, index, prompt)

    def collect(batch: Batch) -> tuple[int, int]:
        result = step(batch)
        finished[0] += result[0]
        return result

    monkeypatch.setattr(RequestBuilder, "_token_ids", count)
    monkeypatch.setattr(Batch, "_step", collect)
    return numbers


def test_prompts_of_encoders_are_prepared_while_others_run(tmp_path: Path, unfinished: list[int]) -> None:
    save_encoder(tmp_path, "Bert")
    prompts = [[3 + i % 7, 4, 5, 6, 7, 8, 9, 10] for i in range(40)]
    with LLM(tmp_path, device="cpu", skip_tokenizer=True, threads=1, prefill_chunk_tokens=8) as encoder:
        vectors = encoder.embed(prompts)
        assert len(unfinished) == 40 and max(unfinished) < STEPS_AHEAD
        assert abs(vectors[0] - vectors[7]).max() < 1e-5
        with pytest.raises(ValueError, match="prompt 30 holds ids outside"):
            encoder.embed([*prompts[:30], [99999], *prompts[31:]])
        assert not encoder.engine.busy
        assert abs(encoder.embed(prompts[:3]) - vectors[:3]).max() < 1e-5


def test_prompts_with_a_cached_prefix_share_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, unfinished: list[int]
) -> None:
    monkeypatch.setattr(llm, "options", replace(llm.options, prefill_chunk_tokens=8))
    llm.embed([[5] * 40 + [6 + i] for i in range(20)])
    assert unfinished == list(range(20))


def test_parameters_reject_tokens_outside_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logit_bias holds 99999; token ids go from 0"):
        llm.generate(["a"], SamplingParams(logit_bias=((99999, 1.0),)))
    assert not llm.engine.busy


def test_a_step_failure_is_raised_by_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(*args: object) -> None:
        raise OSError("the device is gone")

    with LLM(DEMO, device="cpu", threads=1, kv_cache_tokens=1024) as llm:
        monkeypatch.setattr(llm.engine._loop._runner, "collect", collect)
        with pytest.raises(RuntimeError, match=r"^step 1 failed: the device is gone"):
            llm.generate(["A pod"] * 3, GREEDY)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="has already failed: step 1 failed: the device is gone"):
            llm.generate(["A pod"], GREEDY)


@pytest.mark.parametrize(
    ("options", "memory", "chunk"),
    [
        ({}, 0, 8192),  # no GPU
        ({}, 24 << 30, 8192),
        ({}, 80 << 30, 16384),
        ({"device": "cpu"}, 80 << 30, 8192),
        ({"prefill_chunk_tokens": 500}, 80 << 30, 500),
    ],
)
def test_large_gpus_use_larger_prefill_chunks(
    options: dict[str, Any], memory: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(info=None, image_rules=None)
    monkeypatch.setattr(offline, "has_gpu", lambda: memory > 0)
    monkeypatch.setattr(offline, "gpu_bytes", lambda: memory)
    monkeypatch.setattr("mizzen.engine.loading.loader.load_engine", lambda options, followers: engine)
    llm = LLM(DEMO, skip_tokenizer=True, **options)
    assert llm.options.prefill_chunk_tokens == chunk
    assert llm.options.device == options.get("device", "cuda" if memory else "cpu")

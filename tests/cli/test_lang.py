# SPDX-License-Identifier: Apache-2.0
"""Programs in `mizzen.lang`, on an `LLM` of this process and on a service over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import torch
import transformers
from cli_support import MODEL, Served

from mizzen import LLM, Completion
from mizzen.lang import Runtime, SelectMethod, assistant, gen, select, system, user
from mizzen.lang.backends import HttpBackend

QUESTIONS = ("What is a pod?", "What is a node?", "What is Mizzen?")
CHOICES = ("Mizzen serves language models", "A pod is", "A node is a machine of the cluster.", "No")
PREFIX = "Question: What is Mizzen?\nAnswer: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, device="cpu", threads=1, kv_cache_tokens=8192) as loaded:
        yield loaded


@pytest.fixture(params=["llm", "http"])
def runtime(request: pytest.FixtureRequest, llm: LLM, served: Served) -> Iterator[Runtime]:
    with Runtime(llm if request.param == "llm" else served.url) as started:
        yield started


def answer(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def test_text_is_generated_in_the_order_of_the_program(runtime: Runtime, answers: dict[str, str]) -> None:
    state = runtime.state()
    for index, question in enumerate(QUESTIONS[:2]):
        state += answer(question) + gen(f"answer{index}", stop="\n", temperature=0) + "\n"
    assert [state["answer0"].strip(), state["answer1"].strip()] == [answers[text] for text in QUESTIONS[:2]]
    assert state.text().count("Answer:") == 2
    assert state.text().endswith(answers[QUESTIONS[1]] + "\n")


def test_a_conversation_is_rendered_by_the_chat_template(runtime: Runtime, answers: dict[str, str]) -> None:
    state = runtime.state()
    state += system("You are a helpful assistant.")
    state += user(QUESTIONS[0]) + assistant(gen("first", temperature=0))
    start = answers[QUESTIONS[1]][:9]
    state += user(QUESTIONS[1]) + assistant(start + gen("rest", temperature=0))
    assert state["first"] == answers[QUESTIONS[0]]
    assert start + state["rest"] == answers[QUESTIONS[1]]
    assert [message["role"] for message in state.messages()][1:] == ["user", "assistant"] * 2
    assert state.messages()[-1]["content"] == state.text() == answers[QUESTIONS[1]]


@pytest.mark.parametrize("method", SelectMethod)
def test_the_trained_answer_is_selected(method: SelectMethod, runtime: Runtime) -> None:
    state = runtime.state()
    state += user(QUESTIONS[2]) + assistant(select("choice", CHOICES, method) + "!")
    assert state["choice"] == CHOICES[0]
    assert state.text() == CHOICES[0] + "!"


def log_probability(model: Any, ids: list[int], start: int) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids)))


@pytest.mark.parametrize("method", [SelectMethod.TOKEN_NORMALIZED, SelectMethod.UNCONDITIONAL])
def test_selections_equal_those_by_transformers(method: SelectMethod, runtime: Runtime, llm: LLM) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    choices = ("a pod", "a node or", "Kubernetes", "the gate", "1", "10", "\n", "language models on")
    for text in (PREFIX, "A", "The engine holds the", "x = "):
        base, prompts = tokenizer.encode(text), [tokenizer.encode(text + choice) for choice in choices]
        start = min(next((i for i, x in enumerate(base) if ids[i] != x), len(base)) for ids in prompts)
        start = max(start, 1)
        means = []
        for ids in prompts:
            score = log_probability(model, ids, start)
            if method is SelectMethod.UNCONDITIONAL:
                score -= log_probability(model, [ids[0], *ids[start:]], 1)
            means.append(score / (len(ids) - start))
        state = runtime.state()
        state += text + select("choice", choices, method)
        assert state["choice"] == choices[means.index(max(means))]


def test_forks_compute_their_prefix_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    lengths: list[int] = []
    generate = llm.generate

    def count(prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        completions = generate(prompts, params)
        lengths.extend(map(len, prompts))
        computed.extend(
            len(prompt) - done.cached_tokens for prompt, done in zip(prompts, completions, strict=True)
        )
        return completions

    monkeypatch.setattr(llm, "generate", count)
    prefix = " ".join(str(number) for number in range(600))
    with Runtime(llm) as runtime:
        state = runtime.state()
        state += prefix
        forks = state.fork(8)
        for index, fork in enumerate(forks):
            fork += f"\nQuestion: {index}" + gen("answer", max_tokens=4, temperature=0)
        state.join(forks)
        values = state["answer"]
    assert len(values) == 8
    assert state.text() == prefix
    assert llm.tokenizer is not None
    tokens = len(llm.tokenizer.encode(prefix))
    assert tokens > 1500
    shared = tokens - tokens % llm.options.page_size
    assert sum(computed) <= 1.02 * tokens + sum(length - shared for length in lengths)


def test_an_error_is_raised_on_reading_and_affects_no_other_state(runtime: Runtime) -> None:
    state = runtime.state()
    state += answer(QUESTIONS[0])
    good, bad = state.fork(2)
    good += gen("value", max_tokens=4, temperature=0)
    bad += gen("value", regex="(") + "never added"
    assert good["value"]
    with pytest.raises(ValueError, match=r"grammar|regex"):
        bad["value"]
    state.join([good, bad])
    with pytest.raises(ValueError, match=r"grammar|regex"):
        state["value"]


@pytest.mark.parametrize(("status", "kind"), [(400, ValueError), (429, RuntimeError), (500, RuntimeError)])
async def test_the_status_of_a_service_decides_the_error(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="a reason"))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
    with pytest.raises(kind, match="/v1/models: a reason"):
        await HttpBackend("http://service", None, None).encode([[{"role": "", "content": "a"}]])


def test_a_service_that_cannot_be_reached_is_a_failure() -> None:
    with Runtime("http://127.0.0.1:9") as runtime:
        state = runtime.state()
        state += "a" + gen("value")
        with pytest.raises(RuntimeError, match="/v1/models"):
            state["value"]


def test_coroutines_wait_without_blocking(runtime: Runtime, answers: dict[str, str]) -> None:
    async def ask(question: str) -> str:
        state = runtime.state()
        state += user(question) + assistant(gen("answer", temperature=0))
        return (await state)["answer"]

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, QUESTIONS))

    assert asyncio.run(ask_all()) == [answers[question] for question in QUESTIONS]


def test_generated_text_matches_a_grammar(runtime: Runtime) -> None:
    schema = {"type": "object", "properties": {"masts": {"enum": [1, 2, 3]}}, "required": ["masts"]}
    state = runtime.state()
    state += "How many masts? " + gen("json", json_schema=schema) + " or " + gen("regex", regex="[0-9]{3}")
    assert json.loads(state["json"])["masts"] in (1, 2, 3)
    assert len(state["regex"]) == 3
    assert state["regex"].isdigit()


def test_misuse_is_named(llm: LLM) -> None:
    with Runtime(llm) as runtime:
        state = runtime.state()
        state += user("Hi") + gen("answer")
        with pytest.raises(ValueError, match="either text or messages"):
            state.text()
        other = runtime.state()
        with pytest.raises(ValueError, match="forks of this state"):
            other.join([state])
        with pytest.raises(KeyError, match="holds no values"):
            other["missing"]
    with pytest.raises(TypeError, match="temperatur"):
        gen("x", temperatur=0)
    with pytest.raises(ValueError, match="no empty one"):
        select("x", ["a", ""])
    with pytest.raises(ValueError, match="cannot contain a message"):
        assistant(user("Hi"))

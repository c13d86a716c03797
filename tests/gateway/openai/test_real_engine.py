"""The official OpenAI client against a gateway and a real engine with the demo model on the CPU."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pydantic
import pytest

from mizzen.gateway.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "models/demo"
USER: list[Any] = [{"role": "user", "content": "What is Mizzen?"}]
PROMPT = "Mizzen is a"

pytestmark = pytest.mark.xdist_group("demo-engine")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture
async def gateway(live: Callable[..., Any], demo_engine: str, until: Any) -> AsyncIterator[Any]:
    started = await live(demo_engine, wait=False)
    await until(lambda: any(engine.serving for engine in started.gateway.table), 180)
    yield started


@pytest.fixture
def client(gateway: Any) -> openai.AsyncOpenAI:
    return gateway.client().with_options(timeout=120)


@pytest.fixture
def post(gateway: Any) -> Callable[..., Any]:
    """Return a function that posts a body and returns the status and the JSON response."""

    async def send(path: str, **body: Any) -> tuple[int, Any]:
        async with httpx.AsyncClient(timeout=120) as http:
            response = await http.post(f"{gateway.url}{path}", json={"model": "demo", **body})
        return response.status_code, response.json()

    return send


async def complete(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    extra = {key: options.pop(key) for key in list(options) if key in EXTRA}
    return await client.completions.create(model="demo", prompt=prompt, extra_body=extra, **options)


EXTRA = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "guided_regex", "guided_choice",
    "return_token_ids", "skip_special_tokens", "return_tokens_as_token_ids", "add_special_tokens", "regex",
    "guided_json", "json_schema", "ebnf", "structured_outputs", "response_format",
}  # fmt: skip


# ── choices ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_first_choice_uses_the_requests_seed_and_others_differ(client: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 7}
    alone = await complete(client, **options)
    several = await complete(client, n=4, **options)
    again = await complete(client, n=4, **options)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == alone.choices[0].text
    assert len(set(texts)) > 1
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    assert several.usage.completion_tokens == sum(
        len(one) for one in await token_ids_of_choices(client, n=4, **options)
    )


async def token_ids_of_choices(client: Any, **options: Any) -> list[list[int]]:
    answer = await complete(client, return_token_ids=True, **options)
    return [choice.model_extra["token_ids"] for choice in answer.choices]


async def test_streamed_choices_equal_unstreamed_ones(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": USER, "max_tokens": 10, "seed": 3, "n": 3}
    full = await client.chat.completions.create(temperature=1.2, **options)
    stream = await client.chat.completions.create(
        temperature=1.2, stream=True, stream_options={"include_usage": True}, **options
    )
    texts, reasons, roles, usage = ["", "", ""], {}, [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in full.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in full.choices}
    assert sorted(roles) == [0, 1, 2]
    assert usage.completion_tokens == full.usage.completion_tokens
    assert usage.prompt_tokens == full.usage.prompt_tokens


async def test_batched_prompts_are_answered_as_separate_ones(client: Any, tokenizer: Tokenizer) -> None:
    prompts = ["Mizzen", "A pod is", "The gateway"]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    alone = [await complete(client, prompt, **options) for prompt in prompts]
    together = await complete(client, prompts, n=2, **options)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [
        one.choices[0].text for one in alone for _ in range(2)
    ]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert together.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone)
    ids = await complete(client, [tokenizer.encode(prompt) for prompt in prompts], **options)
    assert [choice.text for choice in ids.choices] == [one.choices[0].text for one in alone]


async def test_best_of_returns_the_most_probable_choices(client: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.8, "seed": 5, "logprobs": 0}
    every = await complete(client, n=6, **options)
    best = await complete(client, n=2, best_of=6, **options)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    most_probable = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in most_probable]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    plain = await complete(client, n=1, best_of=6, **{**options, "logprobs": None})
    assert plain.choices[0].text == most_probable[0].text
    assert plain.choices[0].logprobs is None


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_sampling_fields_reach_the_engine(client: Any, tokenizer: Tokenizer) -> None:
    greedy = (await token_ids_of_choices(client, max_tokens=12, temperature=0))[0]
    first = greedy[0]
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, top_k=1))[0] == greedy
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, top_p=0))[0] == greedy
    assert (await token_ids_of_choices(client, max_tokens=12, temperature=2, min_p=1))[0] == greedy
    banned = (
        await token_ids_of_choices(client, max_tokens=12, temperature=0, logit_bias={str(first): -100})
    )[0]
    assert first not in banned
    other = tokenizer.encode("z", add_special_tokens=False)[0]
    forced = await token_ids_of_choices(client, max_tokens=3, temperature=1, logit_bias={str(other): 100})
    assert forced == [[other] * 3]
    once = await token_ids_of_choices(
        client,
        max_tokens=6,
        temperature=0,
        logit_bias={str(other): 10},
        presence_penalty=2,
        frequency_penalty=2,
    )
    freely = await token_ids_of_choices(client, max_tokens=6, temperature=0, logit_bias={str(other): 10})
    assert once[0].count(other) <= freely[0].count(other)
    long = await token_ids_of_choices(client, max_tokens=60, min_tokens=50, temperature=0)
    assert len(long[0]) >= 50


async def test_min_tokens_and_ignore_eos_continue_past_the_end_token(client: Any) -> None:
    chat: dict[str, Any] = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 400}
    plain = await client.chat.completions.create(**chat)
    assert plain.choices[0].finish_reason == "stop"
    count = plain.usage.completion_tokens
    longer = await client.chat.completions.create(**chat, extra_body={"min_tokens": count + 5})
    assert longer.usage.completion_tokens >= count + 5
    assert longer.choices[0].message.content.startswith(plain.choices[0].message.content)
    endless = await client.chat.completions.create(
        **{**chat, "max_tokens": count + 20}, extra_body={"ignore_eos": True}
    )
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage.completion_tokens == count + 20


async def test_special_tokens_are_in_the_text_if_requested(client: Any, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|end|>")
    options: dict[str, Any] = {"max_tokens": 2, "logit_bias": {str(end): 100}, "ignore_eos": True}
    hidden = await complete(client, **options)
    shown = await complete(client, skip_special_tokens=False, **options)
    assert (hidden.choices[0].text, shown.choices[0].text) == ("", "<|end|><|end|>")


async def test_final_message_is_continued(client: Any) -> None:
    started = [*USER, {"role": "assistant", "content": "Mizzen serves"}]
    answer = await client.chat.completions.create(
        model="demo", messages=started, temperature=0, max_tokens=5,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )  # fmt: skip
    prompt = answer.model_extra["prompt_token_ids"]
    assert Tokenizer.load(MODEL).decode(prompt, False).endswith("Mizzen serves")


# ── log probabilities ─────────────────────────────────────────────────────────────────────────────────────


async def test_chat_logprobs_describe_the_answer(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 10}
    answer = await client.chat.completions.create(logprobs=True, top_logprobs=4, **options)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in content).decode() == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 4
        values = [one.logprob for one in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert token.logprob == pytest.approx(values[0], abs=1e-6)  # greedy selects the most probable token
    bare = await client.chat.completions.create(logprobs=True, **options)
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)
    stream = await client.chat.completions.create(logprobs=True, top_logprobs=4, stream=True, **options)
    streamed = [
        token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [(token.token, token.logprob) for token in streamed] == [
        (token.token, token.logprob) for token in content
    ]


async def test_completion_logprobs_describe_answer_and_echo(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 3}
    plain = (await complete(client, **options)).choices[0]
    echoed = (await complete(client, echo=True, return_token_ids=True, **options)).choices[0]
    prompt = tokenizer.encode(PROMPT)
    assert echoed.model_extra["prompt_token_ids"] == prompt
    assert echoed.text == PROMPT + plain.text
    count = len(prompt)
    logprobs = echoed.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs) == count + 6
    assert logprobs.tokens[count:] == plain.logprobs.tokens
    assert logprobs.token_logprobs[count:] == pytest.approx(plain.logprobs.token_logprobs, abs=2e-2)
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
        assert echoed.text[offset:].startswith(token)
    for token, top in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[1:]:
        assert 3 <= len(top) <= 4
        assert token in top


async def test_prompt_logprobs_equal_logprobs_of_generating_the_tokens(
    client: Any, tokenizer: Tokenizer
) -> None:
    """A prompt token's probability equals that of generating it after the preceding tokens."""
    greedy = (await complete(client, temperature=0, max_tokens=5, logprobs=0, return_token_ids=True)).choices[
        0
    ]
    full = tokenizer.encode(PROMPT) + greedy.model_extra["token_ids"]
    echoed = (await complete(client, full, echo=True, max_tokens=1, logprobs=0)).choices[0]
    prompt_logprobs = echoed.logprobs.token_logprobs[len(full) - 5 : len(full)]
    assert prompt_logprobs == pytest.approx(greedy.logprobs.token_logprobs, abs=2e-2)


async def test_max_tokens_zero_with_echo_scores_the_prompt(client: Any, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "temperature": 0}
    alone, longer = [(await complete(client, max_tokens=most, **options)).choices[0] for most in (0, 1)]
    count = len(tokenizer.encode(PROMPT))
    assert (alone.text, alone.finish_reason) == (PROMPT, "length")
    assert alone.logprobs.tokens == longer.logprobs.tokens[:count]
    assert len(alone.logprobs.top_logprobs) == len(alone.logprobs.text_offset) == count
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(
        longer.logprobs.token_logprobs[1:count], abs=2e-2
    )


async def test_echo_is_streamed_first(client: Any) -> None:
    stream = await complete(client, echo=True, stream=True, temperature=0, max_tokens=4, n=2)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    full = await complete(client, echo=True, temperature=0, max_tokens=4)
    assert texts == [full.choices[0].text] * 2


async def test_every_echoed_choice_has_prompt_logprobs(client: Any) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 1, "seed": 3}
    alone = (await complete(client, **options)).choices[0].logprobs
    several = await complete(client, n=3, **options)
    count = len(alone.tokens) - 2
    for choice in several.choices:
        assert choice.logprobs.tokens[:count] == alone.tokens[:count]
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            alone.token_logprobs[1:count], abs=2e-2
        )


async def test_streamed_logprobs_join_to_unstreamed_ones(client: Any) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0}
    full = (await complete(client, "Größe 世界", **options)).choices[0]
    joined: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    text = ""
    async for chunk in await complete(client, "Größe 世界", stream=True, **options):
        text += chunk.choices[0].text
        for name, values in joined.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert text == full.text
    assert joined["tokens"] == full.logprobs.tokens
    assert joined["text_offset"] == full.logprobs.text_offset
    assert joined["token_logprobs"][1:] == pytest.approx(full.logprobs.token_logprobs[1:], abs=2e-2)
    assert any(name.startswith("bytes:\\x") for name in full.logprobs.tokens)


async def test_logprobs_can_name_tokens_by_id(client: Any) -> None:
    answer = await complete(
        client,
        temperature=0,
        max_tokens=3,
        logprobs=1,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
    )
    choice = answer.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.model_extra["token_ids"]]


# ── structured output ─────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "(ab|cd){2}!"}, r"(ab|cd){2}!"),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"[0-9]{3}-[0-9]{2}"),
        ({"guided_choice": ['say "yes"', "no\n"]}, r'say "yes"|no\n'),
        ({"ebnf": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
    ],
)
async def test_answers_match_the_requested_grammar(client: Any, extra: dict[str, Any], pattern: str) -> None:
    answer = await complete(client, max_tokens=60, temperature=1.5, seed=1, n=3, **extra)
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("newer", [False, True])
async def test_structural_tags_constrain_parts_of_the_text(
    client: Any, tokenizer: Tokenizer, newer: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<"],
    }
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    response_format = {"type": "structural_tag", "format": tag} if newer else older
    bias = {str(tokenizer.encode("<", add_special_tokens=False)[0]): 100}
    answer = await complete(
        client,
        response_format=response_format,
        max_tokens=60,
        temperature=0,
        logit_bias={} if newer else bias,
    )
    assert re.search(r'<f>\{\s?"a"\s?:\s?1\s?\}</f>', answer.choices[0].text), answer.choices[0].text


@pytest.mark.parametrize("form", ["json_schema", "guided_json", "response_format"])
async def test_answers_conform_to_the_requested_schema(client: Any, form: str) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "ship", "schema": SCHEMA, "strict": True}}
    constraint: Any = {
        "json_schema": json.dumps(SCHEMA), "guided_json": SCHEMA, "response_format": wrapped,
    }[form]  # fmt: skip
    answer = await client.chat.completions.create(
        model="demo", messages=USER, max_tokens=100, temperature=1, seed=2, extra_body={form: constraint}
    )
    parsed = json.loads(answer.choices[0].message.content)
    assert set(parsed) == {"name", "size"}
    assert parsed["size"] in (1, 2, 3)


class Ship(pydantic.BaseModel):
    name: Literal["Mizzen", "Fock"]
    masts: int = pydantic.Field(ge=1, le=3)


async def test_client_parses_answers_into_its_model(client: Any) -> None:
    answer = await client.chat.completions.parse(
        model="demo", messages=USER, response_format=Ship, max_tokens=60, seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Ship)
    async with client.chat.completions.stream(
        model="demo", messages=USER, response_format=Ship, max_tokens=60, seed=4
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def test_json_object_format_gives_an_object(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=USER, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    assert answer.choices[0].message.content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "(ab"}, "guided_regex"),
        ({"guided_regex": "(" * 10_000 + ")" * 10_000}, "guided_regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"response_format": {"type": "regex", "regex": "[a"}}, "response_format.regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_grammar_that_does_not_compile_gets_400(
    client: Any, extra: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await complete(client, max_tokens=5, stream=stream, **extra)
    assert error.value.type == "invalid_request_error"
    assert error.value.param == param


# ── vectors ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_embeddings_are_normalized_vectors_of_each_input(client: Any, tokenizer: Tokenizer) -> None:
    texts = ["A ship has masts.", "A vessel has masts.", "x"]
    answer = await client.embeddings.create(model="demo", input=texts, encoding_format="float")
    vectors = np.array([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert vectors.shape == (3, 192)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)
    assert (
        answer.usage.prompt_tokens
        == answer.usage.total_tokens
        == sum(len(tokenizer.encode(text)) for text in texts)
    )
    packed = await client.embeddings.create(
        model="demo", input=texts
    )  # the client requests base64 by default
    assert np.array([item.embedding for item in packed.data]) == pytest.approx(vectors, abs=2e-2)
    one = await client.embeddings.create(
        model="demo", input=tokenizer.encode(texts[0]), encoding_format="float"
    )
    assert one.data[0].embedding == pytest.approx(vectors[0], abs=2e-2)
    short = await client.embeddings.create(
        model="demo", input=texts[:1], dimensions=16, encoding_format="float"
    )
    cut = vectors[0][:16] / np.linalg.norm(vectors[0][:16])
    assert short.data[0].embedding == pytest.approx(cut, abs=2e-2)


async def test_embedding_options_change_the_vectors(post: Any) -> None:
    _, mean = await post("/v1/embeddings", input="a b c", pooling="mean")
    _, last = await post("/v1/embeddings", input="a b c")
    assert mean["data"][0]["embedding"] != last["data"][0]["embedding"]
    _, raw = await post("/v1/embeddings", input="a b c", normalize=False, encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    scaled = vector / np.linalg.norm(vector)
    assert scaled == pytest.approx(last["data"][0]["embedding"], abs=2e-2)
    status, error = await post("/v1/embeddings", input="a", dimensions=193)
    assert (status, error["error"]["param"]) == (400, "dimensions")


async def test_pair_scores_are_cosine_similarities(post: Any) -> None:
    left, right = "A ship", ["A ship", "completely unrelated"]
    _, vectors = await post("/v1/embeddings", input=[left, *right])
    embedded = np.array([item["embedding"] for item in vectors["data"]])
    status, body = await post("/v1/score", text_1=left, text_2=right)
    assert status == 200, body
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx((embedded[1:] @ embedded[0]).tolist(), abs=2e-2)
    assert scores[0] == pytest.approx(1, abs=2e-2)
    _, pairs = await post("/v1/score", text_1=right, text_2=right)
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 1], abs=2e-2)


async def test_label_scores_are_probabilities(post: Any, client: Any, tokenizer: Tokenizer) -> None:
    answer = await complete(client, max_tokens=1, temperature=0, logprobs=3, return_tokens_as_token_ids=True)
    top = answer.choices[0].logprobs.top_logprobs[0]
    labels = [int(name.removeprefix("token_id:")) for name in top]
    status, body = await post("/v1/score", query="Mizzen", items=[" is a", " is"], label_token_ids=labels)
    assert status == 200, body
    assert body["scores"][0] == pytest.approx([math.exp(value) for value in top.values()], abs=1e-2)
    _, softmax = await post(
        "/v1/score", query="Mizzen", items=" is a", label_token_ids=labels, apply_softmax=True
    )
    assert sum(softmax["scores"][0]) == pytest.approx(1)
    assert softmax["scores"][0] == pytest.approx(
        np.array(body["scores"][0]) / sum(body["scores"][0]), abs=1e-2
    )
    ids = [tokenizer.encode("Mizzen"), tokenizer.encode(" is a", add_special_tokens=False)]
    _, by_ids = await post("/v1/score", query=ids[0], items=[ids[1]], label_token_ids=labels)
    assert by_ids["scores"][0] == pytest.approx(body["scores"][0], abs=1e-2)
    assert body["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode("Mizzen" + item)) for item in (" is a", " is")
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "query": "c"}, "query"),
        ({"text_1": "a", "text_2": "b", "apply_softmax": True}, "apply_softmax"),
        ({"text_1": "a", "text_2": "b", "item_first": True}, "item_first"),
        ({"query": "a", "items": "b"}, "label_token_ids"),
        ({"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ({"query": [], "items": "b", "label_token_ids": [1]}, "query"),
        ({"query": "a", "items": "b", "label_token_ids": [10**6]}, "label_token_ids"),
    ],
)
async def test_invalid_score_requests_name_the_field(post: Any, body: Any, param: str) -> None:
    status, answer = await post("/v1/score", **body)
    assert status == 400
    assert answer["error"]["param"] == param


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_round_trip(post: Any, tokenizer: Tokenizer, prefix: str) -> None:
    text = "Mizzen, 世界 🙂"
    _, body = await post(f"{prefix}/tokenize", prompt=text, return_token_strs=True)
    assert body["tokens"] == tokenizer.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 2048
    _, bare = await post(f"{prefix}/tokenize", prompt=[text, "a"], add_special_tokens=False)
    assert bare["tokens"] == [tokenizer.encode(one, add_special_tokens=False) for one in (text, "a")]
    assert bare["count"] == [len(ids) for ids in bare["tokens"]]
    _, back = await post(f"{prefix}/detokenize", tokens=bare["tokens"][0])
    assert back == {"prompt": text, "text": text}


async def test_tokenized_conversation_equals_the_prompt(post: Any, client: Any) -> None:
    _, body = await post("/tokenize", messages=USER)
    answer = await client.chat.completions.create(
        model="demo", messages=USER, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert body["tokens"] == answer.model_extra["prompt_token_ids"]
    _, closed = await post("/tokenize", messages=USER, add_generation_prompt=False)
    assert body["tokens"][: closed["count"]] == closed["tokens"]
    assert closed["count"] < body["count"]


async def test_rejection_by_the_engine_gets_400(client: Any) -> None:
    for options, param in (
        ({"prompt": [10**6]}, "prompt"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": list(range(6, 900)) * 3}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await complete(client, **{"max_tokens": 3, **options})
        assert error.value.param == param


async def test_concurrent_requests_answer_as_alone(client: Any) -> None:
    """Mixed requests sent concurrently get the same answers as alone."""
    alone = await complete(client, temperature=0, max_tokens=8)
    answers = await asyncio.gather(
        *(complete(client, temperature=0, max_tokens=8, n=2) for _ in range(4)),
        *(complete(client, temperature=1, max_tokens=8, logprobs=2, echo=True) for _ in range(4)),
        *(client.embeddings.create(model="demo", input=["a", "b"]) for _ in range(4)),
    )
    for answer in answers[:4]:
        assert [choice.text for choice in answer.choices] == [alone.choices[0].text] * 2

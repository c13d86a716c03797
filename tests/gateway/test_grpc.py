# SPDX-License-Identifier: Apache-2.0
"""The gRPC API: generation, embeddings, abort, model information and health, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mizzen.gateway.app import create_app
from mizzen.gateway.grpc import health_service
from mizzen.gateway.grpc import inference_pb2 as pb
from mizzen.gateway.grpc import server as server_module
from mizzen.gateway.grpc.server import NAME, start_grpc
from tenant_kit import ALICE, BOB

RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PROTO = Path(server_module.__file__).with_name("inference.proto")


class Client:
    """Calls of the Inference service on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.health = health_pb2_grpc.HealthStub(channel)

    def generate(self, prompt: list[int], *, timeout: float | None = 60, key: str = "", **fields: Any) -> Any:
        sampling = {name: fields.pop(name) for name in list(fields) if name in SAMPLING}
        request = pb.GenerateRequest(
            model="demo", prompt_token_ids=prompt, sampling=pb.SamplingParams(**sampling), **fields
        )
        call = self.channel.unary_stream(
            f"/{NAME}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        return call(request, timeout=timeout, metadata=credentials(key))

    async def call(self, name: str, request: Any, answer: Any, key: str = "") -> Any:
        call = self.channel.unary_unary(f"/{NAME}/{name}", type(request).SerializeToString, answer.FromString)
        return await call(request, timeout=60, metadata=credentials(key))


SAMPLING = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def credentials(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


@pytest.fixture
async def serve_grpc() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that adds a gRPC server to a live gateway, and returns a client."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(live: Any, app: Any = None) -> Client:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            config = live.gateway.config
            app = app or create_app(config, live.gateway)
            server = await start_grpc(dataclasses.replace(config, grpc_port=port), app, live.gateway)
            stack.push_async_callback(server.stop, 0)
            return Client(await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}")))

        yield start


async def test_tokens_are_streamed(scripted: Any, live: Any, serve_grpc: Any) -> None:
    engine = scripted()
    engine.does.reply, engine.does.end, engine.does.cached_tokens = [11, 12, 13, 2], 2, 1
    client = await serve_grpc(await live(engine))
    call = client.generate(
        [5, 6, 7], temperature=0, max_tokens=8, stop_token_ids=[400], regex="[a-z]+", request_id="mine"
    )
    responses = [response async for response in call]
    assert [token for response in responses for token in response.token_ids][:3] == [11, 12, 13]
    assert [response.finish_reason for response in responses if response.finish_reason] == ["stop"]
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.cached_tokens) == (3, 1)
    assert not any(response.text for response in responses)
    assert ("x-request-id", "mine") in list(await call.trailing_metadata())
    sent = engine.requests[0]
    assert np.frombuffer(sent.prompt, np.int32).tolist() == [5, 6, 7]
    assert (sent.sampling.temperature, sent.sampling.max_tokens) == (0, 8)
    assert sent.sampling.stop_token_ids == (400,)
    assert sent.sampling.grammar == ("regex", "[a-z]+")


async def test_a_real_engine_answers_as_over_http(live_demo: Any, serve_grpc: Any) -> None:
    live = await live_demo()
    client = await serve_grpc(live)
    prompt = list(range(40, 60))
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    responses = [response async for response in client.generate(prompt, return_text=True, **options)]
    answer = await live.client().completions.create(
        model="demo",
        prompt=prompt,
        temperature=0,
        max_tokens=12,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    assert [token for response in responses for token in response.token_ids] == choice.token_ids
    assert "".join(response.text for response in responses) == choice.text
    logprobs = [entry for response in responses for entry in response.logprobs]
    assert [entry.logprob for entry in logprobs] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    for entry, token in zip(logprobs, choice.token_ids, strict=True):
        assert token == entry.top_token_ids[0]
        assert entry.logprob == entry.top_logprobs[0] == max(entry.top_logprobs)
    embedding = await client.call(
        "Embed", pb.EmbedRequest(model="demo", inputs=[pb.TokenIds(ids=prompt)] * 2), pb.EmbedResponse
    )
    first, second = (np.frombuffer(entry.values, "<f4") for entry in embedding.embeddings)
    wanted = await live.client().embeddings.create(model="demo", input=[prompt])
    assert first == pytest.approx(wanted.data[0].embedding, abs=1e-5)
    assert second == pytest.approx(first, abs=1e-5)
    assert embedding.usage.prompt_tokens == 40


async def test_models_are_described(scripted: Any, live: Any, serve_grpc: Any) -> None:
    client = await serve_grpc(await live(scripted(end_token_ids=(2, 3))))
    info = await client.call("GetModelInfo", pb.GetModelInfoRequest(model="demo"), pb.ModelInfo)
    assert (info.context_length, info.vocab_size, list(info.end_token_ids)) == (2048, 512, [2, 3])
    assert info.task == "generate"
    with pytest.raises(grpc.aio.AioRpcError, match="demo") as caught:
        await client.call("GetModelInfo", pb.GetModelInfoRequest(model="other"), pb.ModelInfo)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def fail(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    return caught.value


async def test_errors_have_codes_and_texts_of_the_http_api(
    scripted: Any, live: Any, serve_grpc: Any, keys: Path
) -> None:
    engine = scripted()
    client = await serve_grpc(await live(engine, api_keys_file=(str(keys),)))
    assert (await fail(client.generate([1]))).code() is grpc.StatusCode.UNAUTHENTICATED
    refused = await fail(client.generate([1], key="wrong"))
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "wrong" not in (refused.details() or "")
    invalid = await fail(client.generate([1], key=ALICE, temperature=-1))
    assert invalid.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in (invalid.details() or "")
    assert (await fail(client.generate([], key=ALICE))).code() is grpc.StatusCode.INVALID_ARGUMENT
    engine.does.fault = "own"
    assert (await fail(client.generate([1], key=ALICE, max_tokens=20))).code() is not grpc.StatusCode.OK
    assert (await client.call("Abort", pb.AbortRequest(request_id="none"), pb.AbortResponse)).aborted is False


async def test_cancelled_and_late_calls_end_their_requests(
    scripted: Any, live: Any, serve_grpc: Any, until: Any
) -> None:
    engine = scripted()
    engine.does.reply, engine.does.step_seconds = [10] * 1000, 0.02
    client = await serve_grpc(await live(engine))
    cancelled = client.generate([1], max_tokens=1000)
    assert (await cancelled.read()).token_ids
    cancelled.cancel()
    await until(lambda: len(engine.aborts) == 1)
    late = await fail(client.generate([1], max_tokens=1000, timeout=0.5))
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: len(engine.aborts) == 2)


async def test_a_call_is_aborted_by_its_id_and_key_only(
    scripted: Any, live: Any, serve_grpc: Any, until: Any, keys: Path
) -> None:
    engine = scripted()
    engine.does.reply, engine.does.step_seconds = [10] * 1000, 0.02
    client = await serve_grpc(await live(engine, api_keys_file=(str(keys),)))
    call = client.generate([1], max_tokens=1000, request_id="mine", key=ALICE)
    assert (await call.read()).token_ids
    twin = await fail(client.generate([1], request_id="mine", key=ALICE))
    assert twin.code() is grpc.StatusCode.ALREADY_EXISTS
    abort = pb.AbortRequest(request_id="mine")
    assert not (await client.call("Abort", abort, pb.AbortResponse, key=BOB)).aborted
    assert (await client.call("Abort", abort, pb.AbortResponse, key=ALICE)).aborted
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read():
            pass
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await until(lambda: len(engine.aborts) == 1)
    assert not (await client.call("Abort", abort, pb.AbortResponse, key=ALICE)).aborted


async def test_health_follows_the_gateway(scripted: Any, live: Any, serve_grpc: Any) -> None:
    gateway = await live(scripted())
    client = await serve_grpc(gateway)
    serving, stopped = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", NAME):
        request = health_pb2.HealthCheckRequest(service=service)
        assert (await client.health.Check(request, timeout=60)).status == serving
    watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    statuses: list[int] = []
    async for response in watch:
        statuses.append(response.status)
        gateway.gateway.draining = True
    assert statuses == [serving, stopped]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_number_of_watches_is_limited(
    scripted: Any, live: Any, serve_grpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_service, "MAX_WATCHES", 1)
    client = await serve_grpc(await live(scripted()))
    request = health_pb2.HealthCheckRequest()
    first = client.health.Watch(request, timeout=60)
    assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert (await fail(client.health.Watch(request, timeout=60))).code() is RESOURCE_EXHAUSTED
    first.cancel()


async def test_long_messages_need_a_key_and_have_a_limit(
    scripted: Any, live: Any, serve_grpc: Any, keys: Path
) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),), max_body_bytes=100_000)
    client = await serve_grpc(gateway)
    refused = await fail(client.generate([1] * 60_000, key="wrong"))
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    for count, text in ((60_000, "60000 token ids"), (20_000, "2048")):
        invalid = await fail(client.generate([1] * count, key=ALICE))
        assert invalid.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (invalid.details() or "")


async def test_calls_that_end_without_a_response_have_a_status(
    scripted: Any, live: Any, serve_grpc: Any
) -> None:
    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a detail")

    begun = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    gateway = await live(scripted())
    crashed = await fail((await serve_grpc(gateway, crash)).generate([1]))
    assert (crashed.code(), crashed.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    client = await serve_grpc(gateway, wait)
    ended = asyncio.create_task(fail(client.generate([1], request_id="mine")))
    abort = pb.AbortRequest(request_id="mine")
    await begun.wait()
    assert (await client.call("Abort", abort, pb.AbortResponse)).aborted
    assert (await ended).code() is grpc.StatusCode.CANCELLED
    assert (await ended).details() == "the call was aborted"


async def test_many_calls_at_once_keep_their_answers_apart(scripted: Any, live: Any, serve_grpc: Any) -> None:
    engine = scripted()
    engine.does.reply, engine.does.tokens_a_step = list(range(10, 60)), 3
    client = await serve_grpc(await live(engine))

    async def tokens(length: int) -> list[int]:
        call = client.generate([1] * length, max_tokens=length)
        return [token async for response in call for token in response.token_ids]

    answers = await asyncio.gather(*(tokens(1 + index % 40) for index in range(200)))
    assert all(answer == list(range(10, 11 + index % 40)) for index, answer in enumerate(answers))


def test_the_docs_show_the_protocol() -> None:
    page = Path(__file__).parents[2] / "docs/grpc.md"
    assert f"```proto\n{PROTO.read_text()}```" in page.read_text()


def test_the_generated_code_is_that_of_the_protocol() -> None:
    text = re.sub(r"//.*", "", PROTO.read_text())
    messages = dict(re.findall(r"^message (\w+) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    declared = {
        name: {field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        for name, body in messages.items()
    }
    generated = {
        name: {field.name: field.number for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert declared == generated
    calls = re.findall(r"rpc (\w+)\((\w+)\) returns \((?:stream )?(\w+)\)", text)
    service = pb.DESCRIPTOR.services_by_name["Inference"]
    assert calls == [(m.name, m.input_type.name, m.output_type.name) for m in service.methods]

# SPDX-License-Identifier: Apache-2.0
"""Engine processes are killed or stopped while they answer; all answers equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from live_processes import kill_tree
from mizzen.common.options import flag
from ports import free_ports

DEMO = Path(__file__).parents[3] / "models" / "demo"
SIMULATED = ["-m", "mizzen.server.simulate"]
REAL = ["-c", "from mizzen.cli import main; main()", "engine"]
KINDS = [
    (stream, options)
    for stream in (True, False)
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 11})
]
PATIENT = {
    "engine_timeout_seconds": 2.0,
    "max_resumes": 20,
    "queue_timeout_seconds": 60.0,
    "resume_wait_seconds": 60.0,
}


class EngineProcess:
    """An engine process with its supervisor, as in a pod."""

    def __init__(self, program: list[str], folder: Path, **options: Any) -> None:
        folder.mkdir()
        self.endpoint = f"ipc://{folder}/wire"
        options = {
            "wire_bind": self.endpoint,
            "http_port": free_ports(),
            "termination_message": folder / "end",
            **options,
        }
        words = [word for name, value in options.items() for word in (flag(name), str(value))]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen([sys.executable, *program, *words], stderr=self.log)

    @property
    def rank(self) -> psutil.Process:
        """The child process that runs the model."""
        (rank,) = psutil.Process(self.process.pid).children()
        return rank

    def ended(self) -> str:
        """Return the end of the engine's log, which states why the engine exited."""
        self.log.seek(0)
        return self.log.read()[-2000:]

    def end(self) -> None:
        kill_tree(self.process)
        self.log.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    running: list[EngineProcess] = []

    def start(program: list[str], **options: Any) -> EngineProcess:
        running.append(EngineProcess(program, tmp_path / f"engine-{len(running)}", **options))
        return running[-1]

    yield start
    for engine in running:
        engine.end()


async def serving(gateway: Any, until: Any, engines: list[EngineProcess]) -> None:
    def ready() -> bool:
        for started in engines:
            assert started.process.poll() is None, started.ended()
        return sum(engine.serving for engine in gateway.gateway.table) >= len(engines)

    await until(ready, 120)


async def answer(
    client: openai.AsyncOpenAI, stream: bool, report_tokens: Callable[[int], None], **options: Any
) -> tuple[str, list[int], str | None, int]:
    """Return an answer's text, token ids, finish reason and token count.

    While a stream runs, `report_tokens` is called with the number of its tokens so far.
    """
    extra = {"return_token_ids": True, "ignore_eos": True}
    body = {"model": "demo", "prompt": "The ship", "max_tokens": 300, "extra_body": extra, **options}
    if not stream:
        response = await client.completions.create(**body)
        choice = response.choices[0].model_dump()
        return choice["text"], choice["token_ids"], choice["finish_reason"], response.usage.completion_tokens
    text, ids, reason, count = "", [], None, 0
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.completions.create(**body):
        count = chunk.usage.completion_tokens if chunk.usage else count
        for choice in chunk.choices:
            choice_json = choice.model_dump()
            text, reason = text + choice_json["text"], choice_json["finish_reason"]
            ids += choice_json["token_ids"] or []
            report_tokens(len(ids))
    return text, ids, reason, count


async def all_kinds(
    client: openai.AsyncOpenAI, report_tokens: Callable[[int], None] = lambda count: None
) -> list[tuple[str, list[int], str | None, int]]:
    """Send two requests of each kind, all concurrently; return their answers."""
    return await asyncio.gather(
        *(answer(client, stream, report_tokens, **options) for stream, options in KINDS * 2)
    )


def check(answers: list[Any], undisturbed: list[Any]) -> None:
    assert answers == undisturbed
    for text, ids, reason, count in answers:
        assert text
        assert len(ids) == count == 300
        assert reason == "length"
    assert len({tuple(ids) for _, ids, _, _ in answers}) == 2, "greedy and seeded ones, streamed or whole"


class SignalAfterTokens:
    """Sends a signal to the busiest engine as soon as a stream has `after` tokens."""

    def __init__(self, gateway: Any, engines: list[EngineProcess], number: int, after: int) -> None:
        self._gateway, self._engines = gateway, engines
        self._number, self._after = number, after
        self.victim: EngineProcess | None = None
        self.streams = 0

    def __call__(self, tokens: int) -> None:
        if self.victim is not None or tokens < self._after:
            return
        busiest = max(self._gateway.gateway.table, key=lambda engine: engine.link.open_streams)
        self.streams = busiest.link.open_streams
        self.victim = next(
            process_of_engine
            for process_of_engine in self._engines
            if process_of_engine.endpoint == busiest.discovered.endpoint
        )
        process = self.victim.process if self._number == signal.SIGTERM else self.victim.rank
        os.kill(process.pid, self._number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_simulated_engine_is_killed_or_stopped_in_mid_stream(
    live: Any, until: Any, processes: Any, model_folder: Path, number: int
) -> None:
    """Each token is a hash of the seed and all previous tokens, so a wrong token changes all later ones.

    After SIGTERM, the drain ends before any answer is complete, so all answers resume on other engines.
    """
    options = {"step_milliseconds": 8, "revision": "r", "drain_timeout_seconds": 0.2}
    engines = [processes(SIMULATED, model=model_folder, served_name="demo", **options) for _ in range(2)]
    gateway = await live(*engines, wait=False, **PATIENT)
    await serving(gateway, until, engines)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, timeout=120
    ) as client:
        calm = await all_kinds(client)
        check(calm, calm)
        strike = SignalAfterTokens(gateway, engines, number, after=30)
        check(await all_kinds(client, strike), calm)
    assert strike.victim is not None
    assert strike.streams > 0
    text = gateway.gateway.metrics_text().decode()
    assert "mizzen_gateway_resumes_total{" in text
    if number == signal.SIGTERM:
        assert 'mizzen_gateway_resumes_total{cause="handover"}' in text


async def test_hanging_step_is_resumed_after_the_announced_step_time(
    live: Any, until: Any, processes: Any, model_folder: Path
) -> None:
    """Only the announced step time reveals the hang: the connection is alive; other timeouts are one hour."""
    options = {"step_milliseconds": 2, "revision": "r", "watchdog_seconds": 3600, "model": model_folder}
    good = processes(SIMULATED, served_name="demo", **options)
    bad = processes(SIMULATED, served_name="demo", hang_after_tokens=580, **options)
    patient = {**PATIENT, "engine_timeout_seconds": 1.0}
    patient |= {"engine_stuck_seconds": 0.0, "engine_lost_seconds": 3600.0}
    calm: list[Any] = []
    for engine in (good, bad):
        alone = await live(engine, wait=False, **patient)
        await serving(alone, until, [engine])
        async with alone.client(timeout=120) as client:
            if engine is good:
                calm = await all_kinds(client)
            else:  # run all batch sizes once, so that the engine announces its step time
                for count in (1, 2, 4):
                    await asyncio.gather(*(answer(client, False, print, max_tokens=40) for _ in range(count)))
    gateway = await live(good, bad, wait=False, **patient)
    await serving(gateway, until, [good, bad])
    async with gateway.client(timeout=120) as client:
        check(await all_kinds(client), calm)
    assert 'mizzen_gateway_resumes_total{cause="stuck"}' in gateway.gateway.metrics_text().decode()


NAMES = {
    "type": "array",
    "minItems": 12,
    "maxItems": 12,
    "items": {"type": "string", "minLength": 6, "maxLength": 9},
}
CREW = {"type": "object", "properties": {"crew": NAMES}, "required": ["crew"], "additionalProperties": False}
HELLO = [{"role": "user", "content": "Name the crew."}]
MUSTER = {"type": "function", "function": {"name": "muster", "parameters": CREW, "strict": True}}
LONG = {"prompt": "The ship", "max_tokens": 250, "ignore_eos": True}
RICH: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (
        "chat/completions",
        {
            "messages": HELLO,
            "temperature": 0.9,
            "seed": 3,
            "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "crew", "schema": CREW}},
        },
    ),
    "ebnf": (
        "completions",
        {**LONG, "ebnf": 'root ::= ([a-z]{3} ", "){60} "end"', "temperature": 0.8, "seed": 4},
    ),
    "tool": (
        "chat/completions",
        {
            "messages": HELLO,
            "tools": [MUSTER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0.7,
            "seed": 5,
            "max_tokens": 400,
        },
    ),
    "penalties": (
        "completions",
        {
            **LONG,
            "temperature": 0.0,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": {"17": -100, "40": 2.5},
            "min_tokens": 150,
        },
    ),
    "logprobs": (
        "completions",
        {**LONG, "logprobs": 3, "temperature": 0.9, "seed": 6, "top_k": 40, "min_p": 0.01},
    ),
    "choices": ("completions", {**LONG, "n": 2, "temperature": 1.0, "seed": 7, "top_p": 0.9}),
}

CONSTRAINED = ("schema", "ebnf", "tool")


async def answer_with_details(
    http: httpx.AsyncClient, name: str, stream: bool, report_tokens: Callable[[int], None]
) -> Any:
    """Return the text, tokens, log probabilities, calls and finish reason of each choice of an answer."""
    path, request_body = RICH[name]
    body = {"model": "demo", "return_token_ids": True, **request_body, "stream": stream}
    choices_by_index: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []

    def add_choices(choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            parts = choices_by_index.setdefault(
                choice["index"], {"text": "", "calls": "", "ids": [], "tokens": [], "values": []}
            )
            content = choice.get("delta") or choice.get("message") or choice
            parts["text"] += content.get("content") or content.get("text") or ""
            parts["calls"] += "".join(
                call["function"]["arguments"] for call in content.get("tool_calls") or []
            )
            parts["ids"] += choice.get("token_ids") or []
            parts["reason"] = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            parts["tokens"] += logprobs.get("tokens") or []
            parts["values"] += logprobs.get("token_logprobs") or []
            if name in CONSTRAINED:  # these streams begin last, because their grammars are compiled first
                report_tokens(len(parts["ids"]))

    if not stream:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        add_choices(answer.json()["choices"])
        return choices_by_index
    async with http.stream("POST", path, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                assert "choices" in events[-1], events[-1]
                add_choices(events[-1]["choices"])
    return choices_by_index


async def all_detailed_answers(
    http: httpx.AsyncClient, report_tokens: Callable[[int], None] = lambda count: None
) -> dict[str, Any]:
    """Send a streamed and a unary request of each kind, all concurrently; return the answers by kind."""
    names = [(name, stream) for name in RICH for stream in (True, False)]
    answers = await asyncio.gather(
        *(answer_with_details(http, *name_and_stream, report_tokens) for name_and_stream in names)
    )
    return {f"{name} {stream}": answer for (name, stream), answer in zip(names, answers, strict=True)}


def check_detailed_answers(answers: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for name, choices in answers.items():
        for index, choice in choices.items():
            values, expected = choice.pop("values"), undisturbed[name][index]
            assert values == pytest.approx(expected["values"], abs=1e-3), name
            assert choice == {key: value for key, value in expected.items() if key != "values"}, name
            assert len(choice["ids"]) > 60
        assert choices.keys() == undisturbed[name].keys()


async def test_real_engines_are_killed_or_stopped_in_mid_stream(
    live: Any, until: Any, processes: Any
) -> None:
    """Of three engines, one is killed and then one is stopped; answers with all features are resumed."""
    options = {
        "model": DEMO,
        "served_name": "demo",
        "device": "cpu",
        "threads": 1,
        "kv_cache_tokens": 16384,
        "max_running_requests": 24,
    }
    engines = [processes(REAL, **options) for _ in range(3)]
    gateway = await live(*engines, wait=False, **PATIENT)
    await serving(gateway, until, engines)
    async with (
        gateway.client(timeout=240) as client,
        httpx.AsyncClient(base_url=f"{gateway.url}/v1/", timeout=240) as http,
    ):
        plain, calm = await all_kinds(client), await all_detailed_answers(http)
        check(plain, plain)
        assert len(json.loads(calm["schema True"][0]["text"])["crew"]) == 12
        assert len(json.loads(calm["tool True"][0]["calls"])["crew"]) == 12
        assert calm["tool True"][0]["reason"] == "tool_calls"
        strike = SignalAfterTokens(gateway, engines, signal.SIGKILL, after=30)
        check_detailed_answers(await all_detailed_answers(http, strike), calm)
        assert strike.streams > 0
        check(await all_kinds(client), plain)
        engines.remove(strike.victim)  # type: ignore[arg-type]
        strike = SignalAfterTokens(gateway, engines, signal.SIGSTOP, after=30)
        check_detailed_answers(await all_detailed_answers(http, strike), calm)
        assert strike.streams > 0
    assert "mizzen_gateway_resumes_total{" in gateway.gateway.metrics_text().decode()

# SPDX-License-Identifier: Apache-2.0
"""Engines and gateways of two releases run beside each other, and replace each other while streams run.

    python tests/upgrade/mixed_releases.py --requests 2000

This is the long version of `test_mixed_releases.py`, with the demo model: an upgrade from the previous
release to this one, and the rollback. The last line of the output is a JSON array with all counts; the exit
code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import aiohttp
from noloss.changes import until
from noloss.load import FailedRequest, Question, send_request
from noloss.services import hashed_questions, trained_questions
from previous_release import CURRENT, Release, unpack_previous
from release_programs import Engine, Gateway, Program

ANSWER_SECONDS = 180.0
"""Timeout of a request."""
PHASE_SECONDS = 1800.0
"""Timeout of the wait for the answers of one phase."""
PLACES = 3
"""Maximum number of engines at a time; before an upgrade there is one less."""


def engine_release(name: str) -> str:
    """Return the name of an engine's release; the name of an engine is its endpoint."""
    return Path(name).name.partition("-")[0]


@dataclass
class Traffic:
    """Workers that send requests to the gateway in use, and check every answer; nothing is retried."""

    questions: list[list[Question]]
    """Questions of each worker."""
    gateway: Gateway
    pairs: Counter[str] = field(default_factory=Counter)
    """Number of correct answers, by the releases of gateway and (first) engine."""
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopped: bool = False

    async def learn(self) -> None:
        """Get two equal answers to each question, which all later answers must equal."""
        questions = {id(question): question for part in self.questions for question in part}
        async with aiohttp.ClientSession(trust_env=False) as http:
            for _ in range(2):
                await asyncio.gather(*(self._learn_answer(http, each) for each in questions.values()))

    async def _learn_answer(self, http: aiohttp.ClientSession, question: Question) -> None:
        answer = await send_request(http, self.gateway.url, question.body, question.path)
        question.check(answer)
        question.text, question.finish, question.tokens = answer.text, answer.finish, answer.tokens

    def start(self) -> None:
        """Start all workers."""
        workers = enumerate(self.questions)
        self._tasks = [asyncio.create_task(self._work(part, random.Random(seed))) for seed, part in workers]

    async def stop(self) -> None:
        """Wait for all answers; send no more requests."""
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _work(self, questions: list[Question], choices: random.Random) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as http:
            while not self._stopped:
                gateway, question = self.gateway, choices.choice(questions)
                try:
                    answer = await send_request(http, gateway.url, question.body, question.path)
                    question.check(answer)
                except FailedRequest as error:
                    self.failed.append(f"{gateway.release.name} gateway: {error.kind}: {error}")
                    await asyncio.sleep(0.2)
                    continue
                engine = engine_release(answer.route.partition("engine=")[2].partition(";")[0])
                self.pairs[f"{gateway.release.name} gateway, {engine} engine"] += 1
                self.streams += bool(question.body.get("stream"))


class Rollout:
    """Replaces the engines and the gateway of one release by those of another, under load."""

    def __init__(
        self, folder: Path, before: Release, after: Release, *, simulated: bool, short: bool = False
    ) -> None:
        """Prepare a rollout from the release `before` to `after`.

        Args:
            folder: empty folder for sockets and logs.
            before: release of the engines and the gateway at the beginning.
            after: release of those at the end.
            simulated: whether the engines have no model.
            short: whether each gateway loses only an engine of the other release, not one of each.
        """
        self._folder, self._before, self._after = folder, before, after
        self._simulated, self._short = simulated, short
        self._endpoints = {
            (release.name, place): f"ipc://{folder}/{release.name}-{place}"
            for release in (before, after)
            for place in range(PLACES)
        }
        self._engines: dict[int, Engine] = {}
        """The running engine of each place; at each place, each release has its own endpoint."""
        self._programs: list[Program] = []
        self.kills: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()
        """Number of answers that were resumed, by the releases of gateway and killed engine."""
        self.protocols: dict[str, int | None] = {}
        """Version of the wire protocol that gateways report, by the releases of gateway and engine."""

    def report(self) -> dict[str, Any]:
        """Return all counts."""
        traffic = self.traffic
        return {
            "from": self._before.name,
            "to": self._after.name,
            "answers": traffic.pairs.total(),
            "streams": traffic.streams,
            "failed": len(traffic.failed),
            "pairs": dict(traffic.pairs),
            "killed": dict(self.kills),
            "resumed": dict(self.resumed),
            "protocols": self.protocols,
            "failures": traffic.failed[:10],
        }

    async def run(self, requests: int) -> None:
        """Roll everything from the one release to the other.

        Args:
            requests: minimum number of answers by the gateway of each release through engines of the other.
        """
        try:
            await self._run(requests)
        finally:
            for program in self._programs:
                program.kill()

    async def _run(self, requests: int) -> None:
        before, after = self._before, self._after
        gateway = self._start_gateway(before)
        for place in (0, 1):
            self._start_engine(before, place)
        await self._await_serving(gateway)
        self.traffic = Traffic(self._questions(), gateway)
        await self.traffic.learn()
        self.traffic.start()
        self._start_engine(after, 2)
        await self._await_serving(gateway)
        await self._use_both(gateway, requests)
        await self._replace(0, gateway)
        gateway = await self._replace_gateway(gateway)
        await self._use_both(gateway, requests)
        await self._replace(1, gateway)
        await self.traffic.stop()

    def _questions(self) -> list[list[Question]]:
        """Return the questions of each worker; many different prompts, so that every engine gets some."""
        short = hashed_questions("demo", tuple(range(2, 18)), stream=False)
        streams = hashed_questions("demo", tuple(range(60, 240, 15)), stream=True)
        for entry in (*short, *streams):
            entry["body"]["ignore_eos"] = True
        lanes = [(short, 3), (streams, 6)]
        if not self._simulated:
            lanes.append((trained_questions("demo", stream=True), 1))
        workers: list[list[Question]] = []
        for entries, count in lanes:
            workers += [[Question(**entry) for entry in entries]] * count
        return workers

    def _start_engine(self, release: Release, place: int) -> None:
        folder, endpoint = self._folder / f"engine{len(self._programs)}", self._endpoints[release.name, place]
        self._engines[place] = Engine(release, folder, endpoint, simulated=self._simulated)
        self._programs.append(self._engines[place])

    def _start_gateway(self, release: Release) -> Gateway:
        gateway = Gateway(
            release, self._folder / f"gateway{len(self._programs)}", [*self._endpoints.values()]
        )
        self._programs.append(gateway)
        return gateway

    async def _await_serving(self, gateway: Gateway) -> None:
        """Wait until the gateway routes to exactly the running engines."""
        names = {engine.name for engine in self._engines.values()}

        async def serve() -> bool:
            for engine in self._engines.values():
                if engine.process.poll() is not None:
                    raise AssertionError(engine.log.read_text()[-3000:])
            return (await gateway.engines()).keys() == names

        await until(serve, f"{names} serve")

    async def _use_both(self, gateway: Gateway, requests: int) -> None:
        """Kill engines in mid-stream, and wait for answers of the release that is not the gateway's."""
        own, other = gateway.release, self._after if gateway.release is self._before else self._before
        for release in (other,) if self._short else (other, own):
            await self._kill(gateway, release)
        for engine in (await gateway.engines()).values():
            release_name = engine_release(engine["name"])
            # absent from gateways of releases without negotiation
            self.protocols[f"{own.name} gateway, {release_name} engine"] = engine.get("protocol")
        pair = f"{own.name} gateway, {other.name} engine"

        async def answered() -> bool:
            return self.traffic.pairs[pair] >= requests

        await until(answered, f"{requests} answers of {pair}", PHASE_SECONDS)

    async def _kill(self, gateway: Gateway, release: Release) -> None:
        """Kill the rank of an engine that is answering; restart the engine once its answers have resumed."""
        place, victim = next(pair for pair in self._engines.items() if pair[1].release is release)
        resumes = await gateway.resumes()

        async def answers() -> bool:
            return (await gateway.engines()).get(victim.name, {}).get("requests", 0) > 1

        async def resumed() -> bool:
            return await gateway.resumes() > resumes

        await until(answers, f"{victim.name} answers two requests")
        victim.kill_rank()
        await victim.wait()
        await until(resumed, "an answer of the killed engine goes on")
        self.kills[release.name] += 1
        self.resumed[f"{gateway.release.name} gateway, {release.name} engine"] += (
            await gateway.resumes() - resumes
        )
        self._start_engine(release, place)
        await self._await_serving(gateway)

    async def _replace(self, place: int, gateway: Gateway) -> None:
        """Drain an engine, and start one of the other release in its place."""
        engine = self._engines[place]
        engine.terminate()
        if code := await engine.wait():
            raise AssertionError(f"{engine.name} exited with {code}: {engine.log.read_text()[-3000:]}")
        self._start_engine(self._after, place)
        await self._await_serving(gateway)

    async def _replace_gateway(self, gateway: Gateway) -> Gateway:
        """Start the other release's gateway, send new requests there, and drain the former one."""
        successor = self._start_gateway(self._after)
        await self._await_serving(successor)
        self.traffic.gateway = successor
        gateway.terminate()
        if code := await gateway.wait():
            raise AssertionError(f"the gateway exited with {code}: {gateway.log.read_text()[-3000:]}")
        return successor


async def roll_both_ways(folder: Path, requests: int, *, simulated: bool) -> list[dict[str, Any]]:
    """Upgrade from the previous release to this one, and then go back; return the report of each way."""
    previous = unpack_previous(folder / "previous")
    reports = []
    for number, (before, after) in enumerate(((previous, CURRENT), (CURRENT, previous))):
        way = folder / str(number)
        way.mkdir()
        rollout = Rollout(way, before, after, simulated=simulated)
        await rollout.run(requests)
        reports.append(rollout.report())
        print(json.dumps(reports[-1]), file=sys.stderr, flush=True)
    return reports


def main() -> int:
    """Run both ways, print the counts, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=2000,
        help="minimum number of answers for each pair of a gateway and an engine of different releases",
    )
    parser.add_argument("--simulated", action="store_true", help="use engines without a model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mizzen-upgrade-") as folder:
        reports = asyncio.run(roll_both_ways(Path(folder), options.requests, simulated=options.simulated))
    print(json.dumps(reports))
    return int(any(report["failed"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The simulated engine in a thread, driven over the wire by gateways; wire, loop and scheduler are real."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.core.kv.block_hashes import block_hashes
from mizzen.core.request import FinishReason
from mizzen.server import serving_loop
from mizzen.server.model_files import ModelFolderError, read_model_files, tokenizer_hash
from mizzen.server.simulate import SimulatedEngine, parse_config
from mizzen.server.simulate_config import SimulateConfig
from mizzen.wire.messages import Abort, Blocks, FetchFile, File, RefusalCode, Refused, Stats, Welcome

Make = Callable[..., SimulatedEngine]
Connect = Callable[[str], Any]


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def start(**options: Any) -> SimulatedEngine:
            options = {
                "model": str(model),
                "wire_bind": "tcp://127.0.0.1:*",
                "step_milliseconds": 1.0,
                "drain_timeout_seconds": 0.2,
                "check_integrity": True,
            } | options
            return stack.enter_context(SimulatedEngine(SimulateConfig(**options)))

        yield start


def test_the_welcome_message_describes_the_model_folder(make: Make, model: Path, connect: Connect) -> None:
    engine = make(served_name="tiny", revision="r7", engine_id="pod-0")
    gateway = connect(engine.endpoint)
    welcome = gateway.expect(Welcome)
    assert (welcome.engine, welcome.model, welcome.revision) == ("pod-0", "tiny", "r7")
    assert (welcome.context_length, welcome.vocab_size, welcome.end_token_ids) == (2048, 1000, (2,))
    assert welcome.files == {name: len(content) for name, content in read_model_files(model).items()}
    assert welcome.tokenizer_hash == tokenizer_hash(read_model_files(model))
    gateway.send(FetchFile("config.json"))
    assert gateway.expect(File).content == (model / "config.json").read_bytes()


def test_concurrent_streams_of_two_gateways_equal_sequential_streams(make: Make, connect: Connect) -> None:
    rng = random.Random(3)
    work = {
        rid: ([rng.randrange(1000) for _ in range(rng.randrange(1, 90))], rng.randrange(1, 40))
        for rid in range(60)
    }
    alone = connect(make(max_running_requests=1, prefix_cache="none").endpoint)
    # With little KV, requests are preempted and resumed, which must not change any stream.
    crowd = make(max_running_requests=16, kv_cache_tokens=512, prefill_chunk_tokens=64, page_size=4)
    gateways = [connect(crowd.endpoint) for _ in range(2)]
    for gateway in (alone, *gateways):
        for rid, (prompt, most) in work.items():
            gateway.generate(rid, prompt, max_tokens=most, temperature=0.0)
    for gateway in (*gateways, alone):
        gateway.until(lambda gateway=gateway: len(gateway.ends) == len(work))
        assert gateway.tokens == alone.tokens or gateway is not alone
    for rid, (_, most) in work.items():
        assert len(alone.tokens[rid]) == most
        for gateway in gateways:
            assert gateway.tokens[rid] == alone.tokens[rid]
            assert gateway.ends[rid].output_tokens == most
    assert crowd.status["integrity"] == 0


def test_running_and_waiting_requests_can_be_aborted(make: Make, connect: Connect) -> None:
    gateway = connect(make(max_running_requests=1, step_milliseconds=5.0).endpoint)
    gateway.generate(1)
    gateway.generate(2)
    gateway.until(lambda: len(gateway.tokens[1]) > 3)
    gateway.send(Abort(2))
    gateway.until(lambda: 2 in gateway.ends)
    assert gateway.ends[2].reason == FinishReason.ABORT
    assert gateway.tokens[2] == []
    gateway.send(Abort(1))
    gateway.until(lambda: 1 in gateway.ends)
    assert gateway.ends[1].reason == FinishReason.ABORT
    assert gateway.ends[1].output_tokens == len(gateway.tokens[1])
    gateway.until(
        lambda: any(
            isinstance(message, Stats) and message.steps > 3 and message.running == message.waiting == 0
            for message in gateway.others
        )
    )


def test_requests_of_a_disconnected_gateway_are_aborted(make: Make, connect: Connect) -> None:
    engine = make(max_running_requests=1, step_milliseconds=5.0)
    leaver, stayer = connect(engine.endpoint), connect(engine.endpoint)
    leaver.generate(1)
    leaver.until(lambda: len(leaver.tokens[1]) > 2)
    stayer.generate(1, max_tokens=3)
    leaver.close()
    stayer.until(lambda: 1 in stayer.ends)
    assert stayer.ends[1].reason == FinishReason.LENGTH
    stayer.until(lambda: engine.status["lost_peers"] == 1)


def test_waiting_requests_are_limited_in_time_and_number(make: Make, connect: Connect) -> None:
    gateway = connect(make(max_running_requests=1, max_waiting_requests=2, step_milliseconds=5.0).endpoint)
    gateway.generate(1)
    gateway.until(lambda: len(gateway.tokens[1]) > 1)
    gateway.generate(2, queue_seconds=1.5)
    gateway.generate(3)
    gateway.generate(4)
    full = gateway.expect(Refused)
    assert (full.rid, full.code) == (4, RefusalCode.QUEUE_FULL)
    timed_out = gateway.expect(Refused)
    assert (timed_out.rid, timed_out.code) == (2, RefusalCode.QUEUE_TIMEOUT)
    gateway.send(Abort(1))
    gateway.until(lambda: len(gateway.tokens[3]) > 3)
    assert 2 not in gateway.ends


def test_cache_events_contain_the_hashes_of_the_prompts_blocks(make: Make, connect: Connect) -> None:
    engine = make()
    gateway = connect(engine.endpoint)
    prompt = list(range(200))
    assert gateway.expect(Blocks) == Blocks(0, b"", b"", reset=True)
    gateway.generate(1, prompt, max_tokens=2, salt=b"tenant")
    stored = gateway.expect(Blocks)
    names = list(block_hashes(np.array(prompt, np.int32), b"tenant"))
    assert len(names) == 3
    assert (stored.sequence, np.frombuffer(stored.stored, "<u8").tolist()) == (1, names)
    new_gateway = connect(engine.endpoint)
    assert sorted(np.frombuffer(new_gateway.expect(Blocks).stored, "<u8").tolist()) == sorted(names)


def test_draining_is_announced_immediately(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_loop, "IDLE_SECONDS", 600.0)  # so that nothing else wakes the loop in time
    engine = make()
    gateway = connect(engine.endpoint)
    gateway.expect(Stats)
    engine.drain()
    gateway.until(lambda: any(isinstance(message, Stats) and message.draining for message in gateway.others))
    gateway.generate(1)
    assert gateway.expect(Refused).code == RefusalCode.DRAINING


def test_a_reply_is_tokenized_with_the_folders_tokenizer(make: Make, model: Path, connect: Connect) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: 10 + i for i, word in enumerate(["ahoy", "there", "sailor"])}
    tokenizer = Tokenizer(models.WordLevel(words | {"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    gateway = connect(make(reply="ahoy there sailor").endpoint)
    gateway.generate(1)
    gateway.until(lambda: 1 in gateway.ends)
    assert gateway.tokens[1] == [10, 11, 12, 2]
    assert (gateway.ends[1].reason, gateway.ends[1].stop_token) == (FinishReason.STOP, 2)


def test_the_tokenizer_hash_covers_the_files_that_determine_tokens(model: Path) -> None:
    hash_before = tokenizer_hash(read_model_files(model))
    (model / "config.json").write_text(json.dumps({"vocab_size": 7}))
    assert tokenizer_hash(read_model_files(model)) == hash_before
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(read_model_files(model)) != hash_before
    (model / "model.safetensors").write_bytes(b"weights")
    assert set(read_model_files(model)) == {"config.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_folder_without_a_vocabulary_size_is_rejected(make: Make, model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(RuntimeError) as error:
        _ = make().endpoint
    assert isinstance(error.value.__cause__, ModelFolderError)
    assert "tokenizer.json is missing" in str(error.value.__cause__)


def test_the_command_line_has_an_option_per_configuration_field(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(
        ["--model", "m", "--step-milliseconds", "2.5", "--context-length", "64", "--keys", "k"]
    )
    assert (config.model, config.step_milliseconds, config.context_length, config.keys) == ("m", 2.5, 64, "k")
    assert parse_config(["--model", "m", "--check-integrity", "true"]).check_integrity is True
    for words, message in (
        (["--model", "m", "--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--model", "m", "--step-milliseconds", "x"], "invalid float value: 'x'"),
        ([], "required: --model"),
    ):
        with pytest.raises(SystemExit):
            parse_config(words)
        assert message in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, scripted engines and gateways for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.gateway.app import create_admin_app, create_app
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.http.server import listen, new_server
from mizzen.gateway.http.tls import ServerTls
from mizzen.gateway.text.tokenizer import Tokenizer
from tenant_kit import ALICE, BOB

CORPUS = [
    "Mizzen serves language models on Kubernetes. The gateway tokenizes, routes, and detokenizes.",
    "Ein Schiff mit drei Masten: Fock-, Groß- und Besanmast. Çà et là, œuvre naïve.",
    "你好,世界。こんにちは世界。Привет, мир! 🙂🚀 family: 👨‍👩‍👧",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # stop here",
] * 4
DEMO = Path(__file__).parents[2] / "models/demo"
TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(bos: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's, Llama 3's and Qwen's, trained on a few lines."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    built.add_tokens(["<tool_call>", "Größe"])
    if bos:
        built.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
        )
    return built


def byte_fallback_bpe(strip: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's (with `strip`) or Gemma's: text pieces and 256 byte tokens."""
    words = sorted({"▁" + word for line in CORPUS[:4] for word in line.split()})
    letters = sorted({letter for word in words for letter in word if ord(letter) < 0x2000} | {"▁"})
    tokens = SPECIAL + [f"<0x{value:02X}>" for value in range(256)] + letters
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges: list[tuple[str, str]] = []
    for word in (word for word in words if set(word) <= set(letters)):
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if word[: end + 1] not in vocabulary:
                merges.append(pair)
                vocabulary[word[: end + 1]] = len(vocabulary)
    built = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    built.add_special_tokens(SPECIAL)
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return built


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer with a decoder that only the windowed detokenizer supports."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


def word_piece() -> tokenizers.Tokenizer:
    """Return a tokenizer like BERT's, whose decoder changes spaces between words."""
    built = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


BUILDERS = {
    "byte-level": byte_level_bpe,
    "byte-fallback": byte_fallback_bpe,
    "byte-fallback-no-strip": lambda: byte_fallback_bpe(strip=False),
    "metaspace": metaspace,
    "word-piece": word_piece,
}


@pytest.fixture
def tokenizer(tokenizer_files: dict[str, bytes]) -> Tokenizer:
    """Tokenizer of the models that scripted engines serve."""
    return Tokenizer.from_files(tokenizer_files)


@pytest.fixture(scope="session", params=BUILDERS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BUILDERS[request.param]())


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, bytes]:
    """Return a model's tokenizer files: byte-level BPE that adds a BOS, and a chat template like Qwen's."""
    template = (
        "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return {
        "tokenizer.json": byte_level_bpe(bos=True).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer_files: dict[str, bytes]) -> Path:
    for name, content in tokenizer_files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def load_helpers(name: str) -> Any:
    """Import a helper module of this folder from its file, because tests are not packages."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mizzen_gateway_test_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


engines = load_helpers("engines")
threaded = load_helpers("threaded")


@pytest.fixture
def scripted(tokenizer_files: dict[str, bytes]) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a scripted engine."""
    with contextlib.ExitStack() as stack:

        def start(files: dict[str, bytes] | None = None, **welcome: Any) -> Any:
            return stack.enter_context(engines.ScriptedEngine(files or tokenizer_files, **welcome))

        yield start


@pytest.fixture
def thinking_model(scripted: Any, tokenizer_files: dict[str, bytes]) -> Callable[..., Any]:
    """Return a function that starts an engine with Qwen3's chat template and a fixed answer."""

    def start(answer: str, **behaviour: Any) -> Any:
        inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
        config = {"chat_template": (TEMPLATES / "qwen3.jinja").read_text()}
        files = {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
        engine = scripted(files, vocab_size=inner.get_vocab_size())
        engine.tokenizer = Tokenizer(inner)
        end = engine.tokenizer.token_id("<|im_end|>")
        engine.does.reply = [*engine.tokenizer.encode(answer, add_special_tokens=False), end]
        engine.does.end = end
        for name, value in behaviour.items():
            setattr(engine.does, name, value)
        return engine

    return start


async def wait_until(check: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `check()` returns a true value; raise TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """File with Alice's key and Bob's key; Bob's key allows only the model demo."""
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"""
keys:
  - name: alice
    key: {ALICE}
  - name: bob
    sha256: {hashlib.sha256(BOB.encode()).hexdigest()}
    models: [demo]
    priority: 1
"""
    )
    return path


class LiveGateway:
    """Gateway with its two servers, on this event loop and real sockets."""

    def __init__(self, config: GatewayConfig) -> None:
        self.gateway = Gateway(config)
        self.tls = (
            ServerTls(config.tls_cert, config.tls_key, 0.05) if config.tls_cert and config.tls_key else None
        )
        self._servers = [
            new_server(create_app(config, self.gateway), 2, self.tls),
            new_server(create_admin_app(self.gateway), 1),
        ]
        self._sockets = [listen("127.0.0.1", 0), listen("127.0.0.1", 0)]

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self._sockets[0].getsockname()[1]}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self._sockets[1].getsockname()[1]}"

    def client(self, api_key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        options = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 60, **options}
        return openai.AsyncOpenAI(api_key=api_key, **options)

    async def start(self) -> None:
        await self.gateway.start()
        self._tasks = [
            asyncio.create_task(server.serve([listener]))
            for server, listener in zip(self._servers, self._sockets, strict=True)
        ]
        await wait_until(lambda: all(server.started for server in self._servers))

    async def serving(self, count: int) -> None:
        """Wait until `count` engines serve."""
        await wait_until(lambda: sum(engine.serving for engine in self.gateway.engines) == count)

    async def stop(self) -> None:
        await self.gateway.close()
        await self.gateway.flush()
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def live() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that starts a gateway for scripted engines, and waits until they serve."""
    running: list[LiveGateway] = []

    async def start(*targets: Any, wait: bool = True, **options: Any) -> LiveGateway:
        endpoints = tuple(target if isinstance(target, str) else target.endpoint for target in targets)
        options = {
            "served_name": "demo",
            "queue_timeout_seconds": 60.0,
            "resume_wait_seconds": 60.0,
            "engine": endpoints,
            **options,
        }
        gateway = LiveGateway(GatewayConfig(**options))
        await gateway.start()
        running.append(gateway)
        if wait:
            await gateway.serving(len(targets))
        return gateway

    yield start
    for gateway in running:
        await gateway.stop()


@pytest.fixture(scope="module")
def simulated_url() -> Iterator[str]:
    """Yield the URL of a gateway with a simulated engine of the demo model.

    The gateway runs on a separate event loop.
    """

    async def start(endpoint: str) -> LiveGateway:
        gateway = LiveGateway(
            GatewayConfig(
                served_name="demo", engine=(endpoint,), queue_timeout_seconds=60.0, access_log="off"
            )
        )
        await gateway.start()
        await wait_until(lambda: any(engine.serving for engine in gateway.gateway.table), 60)
        return gateway

    with threaded.simulated_gateway(start) as gateway:
        yield gateway.url


@contextmanager
def real_engine(model: Path | str = DEMO, *, has_kv: bool = True) -> Iterator[str]:
    """Run `mizzen engine` with a model, by default the demo model, and yield its endpoint.

    `has_kv` says whether the model has a KV cache: encoders have none.
    """
    with tempfile.TemporaryDirectory(prefix="mizzen-") as folder:
        endpoint = f"ipc://{folder}/engine"
        options = {"model": model, "device": "cpu", "threads": 1, "wire-bind": endpoint, "http-port": 0}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        arguments += ["--drain-timeout-seconds=1", *(["--kv-cache-tokens=16384"] if has_kv else [])]
        command = [sys.executable, "-m", "mizzen.cli", "engine", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            yield endpoint
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="session")
def run_engine() -> Callable[..., Any]:
    """Return the function that runs an engine with a model in a `with` block, which gives its endpoint."""
    return real_engine


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[str]:
    """The endpoint of an engine with the demo model; all tests share this engine."""
    with real_engine() as endpoint:
        yield endpoint


@pytest.fixture
def live_demo(live: Any, demo_engine: str) -> Callable[..., Any]:
    """Return a function that starts a gateway for the real engine, and returns it once the engine serves."""

    async def start(**options: Any) -> LiveGateway:
        gateway: LiveGateway = await live(demo_engine, wait=False, **options)
        await wait_until(lambda: any(engine.serving for engine in gateway.gateway.table), 180)
        return gateway

    return start


@pytest.fixture
def second_engine() -> Iterator[str]:
    """The endpoint of an engine with the demo model; each test gets a new engine."""
    with real_engine() as endpoint:
        yield endpoint

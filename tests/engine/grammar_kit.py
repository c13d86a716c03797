# SPDX-License-Identifier: Apache-2.0
"""A byte-level vocabulary, and engines with random weights over it, for tests of structured output."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mizzen.core.request import Finished, Request
from mizzen.core.sampling_params import Grammar, SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.grammar.compile_service import CompileResult, GrammarCompiler
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.vocabulary import byte_alphabet, read_vocabulary
from mizzen.engine.loading.loader import load_engine

VOCABULARY = 384
"""Size of the vocabulary; some ids at the end have no token, as in models with a padded vocabulary."""
PIECES = ('{"', '":', '",', '":"', '"}', "true", "null", " the", "ab", "\n\n", "12", "<tool_call>", "é")
SPECIAL = ("<pad>", "<bos>", "<eos>", "[CALL]")
EOS, CALL = 2, 3


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json: special tokens, all bytes, and some longer tokens."""
    alphabet = {value: character for character, value in byte_alphabet().items()}
    words = [*SPECIAL, *(alphabet[byte] for byte in range(256))]
    words += ["".join(alphabet[byte] for byte in piece.encode()) for piece in PIECES]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))


def compiler(folder: Path, **limits: Any) -> GrammarCompiler:
    """Return a compiler for the folder's vocabulary."""
    return GrammarCompiler(str(folder), VOCABULARY, (EOS,), GrammarLimits(**limits))


def make(folder: Path, compiler: GrammarCompiler, delay: Any = None, **options: Any) -> Engine:
    """Load an engine, on the CPU by default."""
    settings = {"page_size": 4, "kv_cache_tokens": 8192, "threads": 1, "check_integrity": True}
    engine_options = EngineOptions(model=str(folder), **(settings | {"device": "cpu"} | options))
    return load_engine(engine_options, delay=delay, compiler=compiler)


def texts(folder: Path, outputs: dict[int, list[int]]) -> dict[int, bytes]:
    """Return the text of each request's output tokens, by request id; end tokens are left out."""
    tokens = read_vocabulary(folder, VOCABULARY)
    return {rid: b"".join(tokens[t] for t in ids if t != EOS) for rid, ids in outputs.items()}


def closing(folder: Path) -> tuple[tuple[int, float], ...]:
    """Return logit biases (token id, bias) that make random logits close strings and objects sooner."""
    tokens = read_vocabulary(folder, VOCABULARY)
    expected = {b'"': 5.0, b"}": 5.0, b"]": 5.0, b'"}': 6.0, b'",': 3.0, b"</": 4.0}
    results = [(i, expected[token]) for i, token in enumerate(tokens) if token in expected]
    return (*results, (EOS, 9.0))


def requests_of(prompts: list[np.ndarray], params: list[SamplingParams], first: int = 0) -> list[Request]:
    pairs = enumerate(zip(prompts, params, strict=True), start=first)
    return [Request(rid=i, prompt=p, sampling=s, seed=1000 + i) for i, (p, s) in pairs]


def run(
    engine: Engine, requests: list[Request], close: bool = True
) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    """Run requests until all have ended; return the output tokens and `Finished` of each by id."""
    tokens: dict[int, list[int]] = {request.rid: [] for request in requests}
    ends: dict[int, Finished] = {}
    deadline = time.monotonic() + 240
    try:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            assert time.monotonic() < deadline
            output = engine.step(time.monotonic())
            if output is not None:
                for rid, token in zip(output.rids.tolist(), output.tokens.tolist(), strict=True):
                    tokens[rid].append(token)
                ends |= {end.rid: end for end in output.finished}
            ends |= {end.rid: end for end in engine.drain_finished()}
    finally:
        if close:
            engine.close()
    return tokens, ends


def wait(condition: Callable[[], Any], seconds: float = 180) -> Any:
    """Wait until a condition returns a true value; return that value."""
    deadline = time.monotonic() + seconds
    while not (results := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)
    return results


def outcome(compiler: GrammarCompiler, grammar: Grammar) -> CompileResult:
    """Compile a grammar and wait for its result."""
    return wait(lambda: compiler.find_or_compile(grammar))


def watch_retractions(engine: Engine) -> list[int]:
    """Return a list to which the id of each request is appended when the scheduler preempts it."""
    scheduler, retracted = engine._loop._scheduler, []
    retract = scheduler._retract

    def watched(sequence: Any, *rest: Any) -> None:
        retracted.append(sequence.rid)
        retract(sequence, *rest)

    scheduler._retract = watched  # type: ignore[method-assign]
    return retracted

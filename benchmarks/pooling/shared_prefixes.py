# SPDX-License-Identifier: Apache-2.0
"""Prompts with a common prefix that is computed once: a reranker's documents, forks and choices of programs.

    python benchmarks/pooling/shared_prefixes.py --shape qwen3-8b [--json]

The model has random weights. `rerank` judges documents (32 of 200 tokens) that follow the same query (2,000
tokens), all sent together: the log probabilities of two tokens after each of them. `fork` is a program in
`mizzen.lang` whose state (2,000 tokens) is forked 8 times and continued by one token each. `select` chooses
among 8 texts by their probabilities; its 4,000 tokens before them are in the prefix cache. Its time runs from
the statement to its result and includes tokenization; the time of the engine alone is reported too. Limits
are the times for the operations, or to read the weights, without computing any prefix twice.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))

from common_parts.arguments import positive
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import benchmark_parser, drain, loaded, print_startup, run
from common_parts.limits import Limits, limits_of
from common_parts.shapes import shape_folder
from common_parts.tables import Table
from gateway_parts.vocabulary import SIZE, Language, Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from mizzen import LLM, Completion, SamplingParams
from mizzen.core.request import Request
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.lang import Runtime, gen, select
from mizzen.models.registry import read_config

CHOICES = ("yes", "no", "maybe", "perhaps not", "a pod", "a node", "both of them", "none of them")


class ComputedTokens:
    """An `LLM` for a `Runtime` that counts the prompt tokens it computes, and the seconds of its batches."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.tokenizer, self.options = llm.tokenizer, llm.options
        self.tokens = 0
        self.seconds = 0.0

    def generate(self, prompts: Sequence[Sequence[int]], params: list[SamplingParams]) -> list[Completion]:
        """Generate like `LLM.generate`."""
        begin = time.perf_counter()
        completions = self._llm.generate(prompts, params, progress=False)
        self.seconds = time.perf_counter() - begin
        counts = zip(prompts, completions, strict=True)
        self.tokens += sum(len(prompt) - completion.cached_tokens for prompt, completion in counts)
        return completions


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer into a model folder: that of the gateway's benchmarks, or one token for each byte."""
    if vocab_size >= SIZE:
        for name, content in Vocabulary().files.items():
            (folder / name).write_bytes(content)
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Return the tokenizer of a model that was loaded with it."""
    if llm.tokenizer is None:
        raise ValueError("the model was loaded without its tokenizer")
    return llm.tokenizer


def random_text(llm: LLM, tokens: int, seed: int) -> str:
    """Return a random text of about `tokens` tokens."""
    tokenizer = tokenizer_of(llm)
    return tokenizer.decode(tokenizer.encode(Language().text(random.Random(seed), 32 + tokens))[:tokens])


def rerank(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[float, int]:
    """Judge documents that follow the same query; return the seconds, and the computed prompt tokens."""
    rng = np.random.default_rng(seed)
    query = rng.integers(0, min(llm.engine.info.vocab_size, 10000), args.query).astype(np.int32)
    highest = min(llm.engine.info.vocab_size, 10000)
    documents = rng.integers(0, highest, (args.documents, args.document)).astype(np.int32)
    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=(1, 2)
    )
    begin = time.perf_counter()
    for rid, document in enumerate(documents):
        prompt = np.concatenate((query, document))
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling))
    computed = 0
    while llm.engine.busy:
        output = llm.engine.step(0.0)
        for ended in () if output is None else output.finished:
            computed += args.query + args.document - ended.cached_tokens
    seconds = time.perf_counter() - begin
    drain(llm, "rerank")
    return seconds, computed


def fork(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Fork a new state; return the seconds, and the computed prompt tokens relative to those of the state."""
    text, counted = random_text(llm, args.state, seed), ComputedTokens(llm)
    prefix_tokens = len(tokenizer_of(llm).encode(text))
    with Runtime(counted) as runtime:  # type: ignore[arg-type]
        state = runtime.state()
        state += text
        state.text()
        begin = time.perf_counter()
        forks = state.fork(args.forks)
        for index, each in enumerate(forks):
            each += f" {index}" + gen("next", max_tokens=1, temperature=0)
        state.join(forks)
        state["next"]
        seconds = time.perf_counter() - begin
    return seconds, counted.tokens / prefix_tokens


def choose(llm: LLM, args: argparse.Namespace, rounds: int) -> list[tuple[float, float]]:
    """Choose after the same text in each round; return the seconds, and those of the engine alone.

    The first round, which computes the text, is left out.
    """
    text, counted = random_text(llm, args.context, 0), ComputedTokens(llm)
    times: list[tuple[float, float]] = []
    with Runtime(counted) as runtime:  # type: ignore[arg-type]
        for _ in range(rounds + 2):
            state = runtime.state()
            state += text + ". Answer:"
            state.text()
            begin = time.perf_counter()
            state += select("answer", CHOICES)
            state["answer"]
            times.append((time.perf_counter() - begin, counted.seconds))
    return times[2:]


def rerank_limit(limits: Limits, args: argparse.Namespace) -> float:
    """Return the minimum seconds of `rerank`."""
    operations = limits.operations(args.query)
    operations += args.documents * limits.operations(args.document, args.query)
    return operations / limits.flops


def measure_rerank(llm: LLM, limits: Limits, args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure `rerank`; the first round, in which GEMMs select their kernels, is left out."""
    rounds = [rerank(llm, args, seed) for seed in range(args.rounds + 1)][1:]
    times = [seconds * 1e3 for seconds, _ in rounds]
    computed = statistics.median(tokens for _, tokens in rounds)
    ratio = computed / (args.query + args.documents * args.document)
    work = f"{args.query} + {args.documents}x{args.document}"
    note = f"{computed:,.0f} tokens computed, {ratio:.3f}x"
    table.row(f"rerank {work}", times, rerank_limit(limits, args) * 1e3, "ms", note)
    return {"ms": statistics.median(times), "computed_tokens": computed, "ratio": ratio}


def measure_fork(llm: LLM, limits: Limits, args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure `fork`; the first round is left out."""
    rounds = [fork(llm, args, seed) for seed in range(args.rounds + 1)][1:]
    times = [seconds * 1e3 for seconds, _ in rounds]
    ratio = statistics.median(ratio for _, ratio in rounds)
    least = limits.prefill(args.state) * 1e3
    table.row(f"fork {args.state} to {args.forks}", times, least, "ms", f"{ratio:.3f}x computed")
    return {"ms": statistics.median(times), "ratio": ratio}


def measure_select(llm: LLM, limits: Limits, args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure `choose`."""
    pairs = choose(llm, args, args.rounds)
    least = limits.prefill(1, start=args.context) * 1e3
    figures: dict[str, Any] = {}
    for name, times in zip(("select", "select, engine"), zip(*pairs, strict=True), strict=True):
        milliseconds = [seconds * 1e3 for seconds in times]
        table.row(f"{name} {len(CHOICES)} of {args.context}", milliseconds, least, "ms")
        figures[name] = {"ms": statistics.median(milliseconds)}
    return figures


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure all three."""
    options = engine_options(args, load_format="dummy") | {"skip_tokenizer": False}
    with shape_folder(args.shape) as folder:
        config = read_config(folder)
        write_tokenizer(folder, config.vocab_size)
        with loaded(args.device, folder, options) as llm:
            limits = limits_of(args, config, options)
            figures = {
                "rerank": measure_rerank(llm, limits, args, table),
                "fork": measure_fork(llm, limits, args, table),
                **measure_select(llm, limits, args, table),
            }
            return {"shared_prefixes": figures, **print_startup(llm)}


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument("--query", type=positive, default=2000, help="tokens of a query")
    parser.add_argument("--documents", type=positive, default=32, help="documents of a query")
    parser.add_argument("--document", type=positive, default=200, help="tokens of a document")
    parser.add_argument("--state", type=positive, default=2000, help="tokens of a forked state")
    parser.add_argument("--forks", type=positive, default=8, help="number of forks")
    parser.add_argument("--context", type=positive, default=4000, help="tokens before the choices")
    small = {"query": 64, "documents": 3, "document": 8, "state": 64, "forks": 2, "context": 96}
    args = parse_checked_args(parser, **small)
    run(args, measure)


if __name__ == "__main__":
    main()

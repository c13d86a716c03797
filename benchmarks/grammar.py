# SPDX-License-Identifier: Apache-2.0
"""Cost of structured output: time of a decode step with and without grammars, and time to compile a grammar.

Penalties and log probabilities are measured, too.

    python benchmarks/grammar.py --shape qwen3-0.6b [--batch 64] [--only logprobs,penalties] [--json]
    python benchmarks/grammar.py --device cpu --layers 2 [--json]
    python benchmarks/grammar.py --host [--batch 64] [--json]

Weights are random. The vocabulary is that of a real tokenizer with 128,000 entries, which is created once and
kept in the temporary folder. If the shape has room for more entries, whole words are added until a few
hundred ids remain without a token, as in real models. All rows of a batch use the grammar, and no grammar
lets an output end. The result is the mean time of a step while all rows decode: the median of the rounds.
`mask_ms` is the part of that time that the engine's loop spends on token masks; on a GPU it overlaps with the
model.

`--host` runs no model: it picks random allowed tokens, and reports the time that a step spends on matching
and on masks, as wall time and as CPU time of all threads. With one thread the two times are equal. With
several `--mask-threads`, wall time is the relevant figure if the machine has an idle core for each thread.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common_parts.arguments import jsonable, natural, not_negative, positive
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import benchmark_parser, fail, loaded, median, print_startup, require_device
from common_parts.machine_info import machine
from common_parts.shapes import SHAPES
from gateway_parts.vocabulary import Vocabulary

from mizzen import LLM, Grammar, GrammarKind, SamplingParams
from mizzen.core.outputs import GrammarCounts
from mizzen.core.request import Request
from mizzen.engine.grammar.compiled import CompiledGrammar
from mizzen.engine.grammar.matchers import GrammarMasks
from mizzen.engine.grammar.vocabulary import byte_alphabet
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget
from mizzen.engine.uploader import Uploader

PROMPT, FIRST, LAST = 100, 16, 112
LEAST_VOCABULARY = 128_256
"""Minimum vocabulary size of the model: the 128,000 entries of the tokenizer and some unused ids."""
SPARE_IDS = 256
"""Number of ids in the model's vocabulary that have no token."""
RECORDS = r"""
root ::= record "\n" root
record ::= "{\"id\":" [1-9] [0-9]{2,5} ",\"name\":\"" name "\",\"ok\":" ("true" | "false") "}"
name ::= [A-Z] [a-z]{2,11} (" " [A-Z] [a-z]{2,11})?
"""
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99999},
            "name": {"type": "string"},
            "kind": {"enum": ["person", "place", "thing"]},
            "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        },
        "required": ["id", "name", "kind", "scores"],
        "additionalProperties": False,
    },
}
CALL = {
    "type": "tag",
    "begin": '<tool_call>{"name": "find", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA["items"], "max_whitespace_cnt": 1},
    "end": "}</tool_call>",
}
TOOLS = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
GRAMMARS = {
    "none": None,
    "json_schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "ebnf": Grammar(GrammarKind.EBNF, RECORDS),
    "tools": Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": TOOLS})),
}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "logprobs of 20": {"logprobs": 20},
    "penalties and logprobs": {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 5},
}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the files of a tokenizer for `vocab_size` ids; the last `SPARE_IDS` of them have no token."""
    vocabulary = Vocabulary()
    files = dict(vocabulary.files)
    content = json.loads(files["tokenizer.json"])
    entries: dict[str, int] = content["model"]["vocab"]
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for word in vocabulary.language.words:
        if len(entries) >= vocab_size - SPARE_IDS:
            break
        text = "".join(letters[byte] for byte in f" {word}".encode())
        entries.setdefault(text, len(entries))
    files["tokenizer.json"] = json.dumps(content).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def vocab_size_of(shape: str) -> int:
    """Return the vocabulary size of a shape, or `LEAST_VOCABULARY` if that is larger, as for "tiny"."""
    return max(SHAPES[shape]["vocab_size"], LEAST_VOCABULARY)


@contextmanager
def load(args: Any) -> Iterator[LLM]:
    """Provide an engine with the shape of the command line, random weights and a real vocabulary."""
    config = dict(SHAPES[args.shape]) | {"vocab_size": vocab_size_of(args.shape)}
    if args.layers:
        config["num_hidden_layers"] = args.layers
    config["eos_token_id"] = config["vocab_size"] - 1
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), config["vocab_size"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = engine_options(
            args,
            load_format="dummy",
            max_running_requests=args.batch,
            cuda_graph_max_batch=args.batch,
            kv_cache_tokens=args.batch * 512,
        )
        with loaded(args.device, Path(folder), options) as llm:
            yield llm


def step_seconds(llm: LLM, features: dict[str, Any], batch: int, temperature: float) -> tuple[float, float]:
    """Run a batch; return the mean seconds of a step while all rows decode.

    The second value is the part of that time that the engine's loop spends on token masks, in seconds.
    """
    sampling = SamplingParams(temperature=temperature, max_tokens=LAST + 8, ignore_eos=True, **features)
    rng = np.random.default_rng(0)
    for rid in range(batch):
        prompt = rng.integers(0, 100_000, PROMPT).astype(np.int32)
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))
    marks: list[tuple[float, float]] = []
    while llm.engine.busy:
        output = llm.engine.step(0.0)
        llm.engine.drain_cache_events()
        for ended in llm.engine.drain_finished():
            fail(f"batch {batch}: a request failed: {ended.message}")
        if output is None or len(output.rids) < batch:
            continue
        if output.offsets.min() >= FIRST and output.offsets.max() <= LAST:
            marks.append((time.perf_counter(), llm.engine.grammar_counts.mask_seconds))
    if len(marks) < 2:
        fail(f"the KV cache or max_running_requests is too small for a batch of {batch}: lower --batch")
    (begin, masks_begin), (end_at, masks_end) = marks[0], marks[-1]
    count = len(marks) - 1
    return (end_at - begin) / count, (masks_end - masks_begin) / count


def features_to_measure(only: str | None) -> dict[str, dict[str, Any]]:
    """Return sampling parameters by name: first "none", then all features, or only those in `only`."""
    features: dict[str, dict[str, Any]] = {
        name: {} if grammar is None else {"grammar": grammar} for name, grammar in GRAMMARS.items()
    }
    features |= FEATURES
    if only is None:
        return features
    return {name: features[name] for name in dict.fromkeys(["none", *only.split(",")])}


def compile_seconds(llm: LLM, names: Iterable[str]) -> dict[str, float]:
    """Return, for each grammar, the seconds for which the first request with it waits for compilation."""
    seconds: dict[str, float] = {}
    for name in names:
        grammar = GRAMMARS.get(name)
        if grammar is None:
            continue
        once = SamplingParams(grammar=grammar, max_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([[1, 2, 3]], once, progress=False)
        first = time.perf_counter() - began
        began = time.perf_counter()
        llm.generate([[1, 2, 3]], once, progress=False)
        seconds[name] = first - (time.perf_counter() - began)
    return seconds


def host_step(vocab_size: int, grammar: Grammar, batch: int, steps: int, threads: int) -> dict[str, float]:
    """Return the host times, in microseconds, of a step in which every row of a batch uses the grammar."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), vocab_size)
        target = GrammarTarget(folder=folder, vocab_size=vocab_size, end_token_ids=(vocab_size - 1,))
        compiled = GrammarBuilder(target, threads=2, nesting=64).compile(grammar)
    counts, rng, slots = GrammarCounts(), np.random.default_rng(0), np.arange(batch)
    masks = GrammarMasks(vocab_size, Uploader(torch.device("cpu")), counts, threads=threads)
    for slot in range(batch):
        masks.start_slot(
            slot, CompiledGrammar(grammar.kind, grammar.text, compiled, slot), np.empty(0, np.int32)
        )
    wall, spent = [], []
    for _ in range(steps):
        began, used = time.perf_counter(), time.process_time()
        bits = masks.update_bitmasks(slots, slots).numpy()
        wall.append(time.perf_counter() - began)
        spent.append(time.process_time() - used)
        rows = (np.unpackbits(bits[slot].view(np.uint8), bitorder="little") for slot in slots.tolist())
        tokens = np.array([rng.choice(np.flatnonzero(row)) for row in rows])
        masks.add_launched_step(slots, lambda tokens=tokens: tokens)
    masks.close()
    microseconds = np.array(wall[FIRST:]) * 1e6
    return {
        "us": float(np.median(microseconds)),
        "p90_us": float(np.percentile(microseconds, 90)),
        "processor_us": float(np.median(spent[FIRST:]) * 1e6),
        "mean_processor_us": float(np.mean(spent[FIRST:]) * 1e6),
    }


def host(args: Any) -> dict[str, dict[str, float]]:
    """Measure the host time of a step for all grammars, without a model."""
    results: dict[str, dict[str, float]] = {}
    for name, grammar in GRAMMARS.items():
        if grammar is None:
            continue
        vocab_size = vocab_size_of(args.shape)
        results[name] = result = host_step(vocab_size, grammar, args.batch, LAST, args.mask_threads)
        print(
            f"batch {args.batch} {name:>12}: {result['us']:8.0f} us wall time a step "
            f"(p90 {result['p90_us']:.0f}), "
            f"{result['processor_us']:.0f} us of CPU time (mean {result['mean_processor_us']:.0f})"
        )
    return results


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--host", action="store_true", help="measure only the host's part of a step, without a model"
    )
    parser.add_argument("--batch", type=positive, default=64, help="requests that decode together")
    parser.add_argument(
        "--mask-threads", type=positive, default=1, help="number of threads that compute masks, with --host"
    )
    parser.add_argument("--only", help="comma-separated names of the features to measure")
    parser.add_argument(
        "--layers", type=natural, default=0, help="run only this number of layers of the shape; 0 for all"
    )
    parser.add_argument("--temperature", type=not_negative, default=0.6, help="0 is greedy")
    args = parse_checked_args(parser, batch=1, rounds=1)
    known = {*GRAMMARS, *FEATURES}
    if args.only is not None and (unknown := set(args.only.split(",")) - known):
        parser.error(f"--only {', '.join(sorted(unknown))}: must be among {', '.join(sorted(known))}")
    if args.host:
        results = host(args)
        if args.json:
            print(json.dumps({"host": results}))
        return
    require_device(args.device)
    steps: dict[str, dict[str, float]] = {}
    with load(args) as llm:
        llm.generate(
            [[1, 2, 3]], SamplingParams(max_tokens=1, grammar=Grammar(GrammarKind.REGEX, "a")), progress=False
        )
        features = features_to_measure(args.only)
        compiling = compile_seconds(llm, features)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in features}
        for _ in range(args.rounds):
            for name, parameters in features.items():
                rounds[name].append(step_seconds(llm, parameters, args.batch, args.temperature))
        base = median([took for took, _ in rounds["none"]])
        for name, measured in rounds.items():
            took, mask = (median(list(column)) for column in zip(*measured, strict=True))
            steps[name] = {"ms": took * 1e3, "mask_ms": mask * 1e3, "overhead": took / base - 1}
            print(
                f"{args.shape} batch {args.batch} {name:>22}: {took * 1e3:6.2f} ms a step "
                f"({took / base - 1:+.1%}), masks {mask * 1e3:5.2f} ms, "
                f"first compilation {compiling.get(name, 0.0):.2f} s"
            )
        results = {"steps": steps, "compile_seconds": compiling, **print_startup(llm)}
    if args.json:
        output = {"options": vars(args), "machine": machine(args.device), **results}
        print(json.dumps(jsonable(output), default=str))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time of one step with decodes and one prefill chunk, by how its attention is run, for `mixed.py`.

The step has `--batch` decodes whose contexts have `--context` tokens, and a chunk of a prompt, behind
`--chunk-start` tokens of that prompt. Each variant is a captured graph of the whole forward pass, from the
token ids to the logits:

    sequences          decodes and chunk in one call of FlashAttention 3
    apart              decodes with the engine's decode kernel, the chunk with FlashAttention 3
    apart by length    the same, with length-aware splits of the decodes
    few chunks         the same, for at most two chunks, whose contexts are split
    eager              without a graph; decodes and chunk apart
    eager and sampled  the same, with sampling, as the engine runs a step that is not captured

The limit is the time to read weights and KV, or for the operations of the GEMMs, if that is longer. `decodes
alone` has no chunk. "per prompt token" is the time that a variant adds to it, divided by the chunk's tokens.
The last lines show which chunk and step duration the scheduler reaches with these times if it aims at
`--max-step-milliseconds`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common_parts.engine_options import engine_options
from common_parts.gpu import fail
from common_parts.layer_attention import seconds_of
from common_parts.limits import Limits, limits_of
from common_parts.shapes import shape_folder
from common_parts.tables import Table
from mizzen.attention.base import DevicePlannedDecode, MixedAttention, StepAttention
from mizzen.attention.mixed_batches import (
    PREFERRED_PLANNERS,
    MixedPlanner,
    MixedPlanners,
    select_planners,
)
from mizzen.core.config import SchedulerConfig
from mizzen.core.prefill_budget import PrefillBudget
from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.engine.execution.prefill_graphs import PrefillGraphs
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading.model_setup import make_attention_with_kv, make_model
from mizzen.engine.loading.resolve import resolve_kv_dtype, uses_own_kernels
from mizzen.engine.loading.warmup import compile_kernels
from mizzen.engine.uploader import Uploader
from mizzen.models.registry import read_config

SIMULATED_STEPS = 400


@dataclass(frozen=True, slots=True)
class Rig:
    """A model with random weights, its KV cache, and one decode per slot; the last slot runs the chunk."""

    step: StepExecutor
    page_size: int
    rows: int
    """Number of decodes."""
    chunk_start: int
    """Number of tokens of the prompt that precede the chunk."""

    @classmethod
    def make(cls, args: argparse.Namespace, folder: Path) -> Rig:
        """Build the model, and give each decode a context of `args.context` tokens in scattered pages."""
        given = {name: value for name, value in engine_options(args).items() if name != "skip_tokenizer"}
        options = EngineOptions(model=str(folder), device=args.device, load_format="dummy", **given)
        model = make_model(options, read_config(folder), lambda done, total: None)
        page, longest = options.page_size, max(args.context, args.chunk_start + max(args.chunk_tokens)) + 1
        rows, columns = args.batch, -(-longest // page)
        pages = (rows + 1) * columns
        attention = make_attention_with_kv(
            model,
            page,
            pages + 1,  # the last page is the scratch page
            prefill=options.attention_prefill,
            decode=options.attention_decode,
            dtype=resolve_kv_dtype(options, model.embedding.weight.dtype),
        )
        upload = Uploader(torch.device(args.device))
        state = SlotState(rows + 1, columns, upload, pages, vocab=model.config.vocab_size)
        table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(rows + 1, columns)
        slots, page_columns = np.indices(table.shape).astype(np.int32)
        state.write_pages(PageWrites(slots.ravel(), page_columns.ravel(), table.ravel()))
        state.lengths[:rows] = args.context - 1
        if args.device == "cuda" and not attention.kv.quantized:
            attention.kv.keys.normal_()
            attention.kv.values.normal_()
        step = StepExecutor(model, attention, state, upload, fused=uses_own_kernels(options))
        return cls(step, page, rows, args.chunk_start)

    @property
    def attention(self) -> MixedAttention:
        """The attention backends."""
        return self.step.attention

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.step.upload.device

    def plan(self, chunk_tokens: int) -> StepPlan:
        """Return a step with all decodes and a chunk of a prompt; 0 for no chunk."""
        tokens = np.arange(chunk_tokens, dtype=np.int32) % 100
        chunk = PrefillChunk(slot=self.rows, start=self.chunk_start, tokens=tokens, last=True)
        return StepPlan(
            step=1,
            decode=np.arange(self.rows, dtype=np.int32),
            decode_version=1,
            pages=PageWrites(),
            prefill=(chunk,) if chunk_tokens else (),
        )

    def eager(self, plan: StepPlan) -> Callable[[], object]:
        """Return a function that runs the forward pass of a plan without a graph."""
        layout = BatchLayout.from_plan(plan, self.step.state)
        return lambda: self.step.run_eager(plan, layout, [])

    def whole_step(self, plan: StepPlan) -> Callable[[], object]:
        """Return a function that runs a plan with sampling; the lengths of slots stay as they are."""
        lengths = self.step.state.lengths.copy()

        def run_step() -> None:
            self.step(plan)
            self.step.state.lengths[:] = lengths

        return run_step

    def captured(self, plan: StepPlan, planner: MixedPlanner) -> Callable[[], object]:
        """Return a function that replays a graph of the forward pass of a plan, captured with `planner`."""
        layout = BatchLayout.from_plan(plan, self.step.state)
        graphs = PrefillGraphs(
            self.step.model,
            self.attention,
            self.step.state,
            self.step.upload,
            [len(layout.slots)],
            self.rows + 1,
            MixedPlanners(planner),
        )
        compile_kernels(self.step, {len(layout.slots), self.rows + 1}, self.device, 8)
        graphs.capture(torch.cuda.current_stream())
        rows = np.empty(0, np.int64) if layout.sample_rows is None else layout.sample_rows
        return lambda: graphs(plan, layout, rows)

    def captured_decodes(self) -> Callable[[], object]:
        """Return a function that replays a graph of the decodes alone."""
        from mizzen.kernels.decode_inputs import gather_inputs

        step, backend = self.step, self.attention.decode
        if not isinstance(backend, DevicePlannedDecode):
            fail("the decode backend cannot be captured")
        compile_kernels(step, {self.rows}, self.device, 8)
        slots = torch.arange(self.rows, dtype=torch.int32, device=self.device)
        positions = torch.from_numpy(step.state.lengths[: self.rows]).to(self.device)
        table = step.state.page_table.device

        def enqueue() -> None:
            batch = gather_inputs(slots, positions, step.state.last_tokens, table, self.page_size, -1)
            decode = backend.plan_decode_on_device(slots, batch.lengths, table)
            attend = StepAttention(self.attention.kv, batch.slot_mapping, self.rows, decode, None)
            step.model.logits(step.model.hidden(batch.tokens, batch.positions, attend))

        return capture_graph(enqueue, torch.cuda.current_stream(), None).replay


def planners(rig: Rig) -> Iterator[tuple[str, MixedPlanner]]:
    """Yield the name and the planner of each captured variant; print why others cannot run."""
    few_chunks = None
    for planner in reversed(PREFERRED_PLANNERS):
        name = planner.replace("-", " ")
        try:
            selected = select_planners(rig.attention.prefill, rig.attention.decode, rig.rows, planner)
        except ValueError as error:
            print(f"  {name}: {error}")
            continue
        few_chunks = selected.few_chunks or few_chunks
        yield name, selected.any_chunks
    if few_chunks is not None:
        yield "few chunks", few_chunks


def simulate_budget(
    alone: float, mixed: Mapping[int, float], milliseconds: float, page_size: int
) -> tuple[int, float]:
    """Return the chunk in tokens, and the seconds of a step, that the scheduler's prefill budget settles on.

    Args:
        alone: seconds of a step without a chunk.
        mixed: seconds of a step by tokens of its chunk; times between and above these numbers of tokens are
            interpolated.
        milliseconds: target duration of a step.
        page_size: tokens in a KV page; the budget is a multiple of it.
    """
    sizes = [0, *sorted(mixed)]
    times = [alone, *(mixed[size] for size in sizes[1:])]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])

    def seconds(tokens: int) -> float:
        if tokens > sizes[-1]:
            return times[-1] + slope * (tokens - sizes[-1])
        return float(np.interp(tokens, sizes, times))

    config = SchedulerConfig(
        pages_total=1, context_length=2, page_size=page_size, max_step_milliseconds=milliseconds
    )
    budget, now = PrefillBudget(config), 0.0
    for _ in range(4):
        now += alone
        budget.record_step(now - alone, now, 0, decodes=True)
    mixed_steps = []
    for _ in range(SIMULATED_STEPS):
        tokens = budget.tokens(decodes=True)
        now += seconds(tokens)
        budget.record_step(now - seconds(tokens), now, tokens, decodes=True)
        mixed_steps += [tokens] if tokens else []
    settled = int(np.median(mixed_steps[-SIMULATED_STEPS // 4 :]))
    return settled, seconds(settled)


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure the decodes alone, then each variant with each chunk."""
    if engine_options(args)["tensor"] > 1:
        fail("--tensor: this benchmark uses one GPU")
    with shape_folder(args.shape) as folder, torch.inference_mode():
        rig = Rig.make(args, folder)
        limits = limits_of(args, read_config(folder), engine_options(args))
        stream = torch.cuda.Stream() if args.device == "cuda" else None
        with torch.cuda.stream(stream):
            return measure_variants(args, rig, limits, table)


def measure_variants(
    args: argparse.Namespace, rig: Rig, limits: Limits, table: Table
) -> dict[str, dict[str, Any]]:
    """Measure all variants, and print the chunk that the scheduler would choose with each."""
    on_gpu = args.device == "cuda"

    def record(name: str, chunk: int, step: Callable[[], object]) -> float:
        seconds = seconds_of(lambda: (step(), None)[1], rig.device, args.rounds)
        limit = limits.mixed(args.batch, args.context, chunk, args.chunk_start)
        added = f"{(seconds - alone) / chunk * 1e6:.1f} us per prompt token" if chunk else ""
        work = f"{args.batch}+{chunk}, {name}" if chunk else name
        table.row(work, seconds * 1e3, limit * 1e3, "ms", added)
        return seconds

    alone = 0.0
    alone = record("decodes alone", 0, rig.captured_decodes() if on_gpu else rig.eager(rig.plan(0)))
    times: dict[str, dict[int, float]] = {}
    for chunk in args.chunk_tokens:
        plan = rig.plan(chunk)
        for name, planner in planners(rig) if on_gpu else ():
            times.setdefault(name, {})[chunk] = record(name, chunk, rig.captured(plan, planner))
        times.setdefault("eager", {})[chunk] = record("eager", chunk, rig.eager(plan))
        sampled = record("eager and sampled", chunk, rig.whole_step(plan))
        times.setdefault("eager and sampled", {})[chunk] = sampled
    settled = {}
    for name, by_chunk in times.items():
        tokens, seconds = simulate_budget(alone, by_chunk, args.max_step_milliseconds, rig.page_size)
        settled[name] = {"chunk_tokens": tokens, "step_ms": seconds * 1e3}
        print(f"  {name}: the scheduler settles on {tokens} prompt tokens and {seconds * 1e3:.1f} ms a step")
    return {"decodes_alone": {"seconds": alone}, "seconds": times, "settled": settled}

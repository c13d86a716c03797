# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of decode steps equal the eager reference, with captured and with uncaptured kernels.

All but the tests of whole engines run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, make_model
from triton_device import DEVICE, GPU, RUNS_TRITON

from mizzen import LLM, SamplingParams
from mizzen.core.step_plan import SlotLogprobs, SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.graph_logprobs import LogprobGraphs, captured_row_counts, compute_logprobs_fused
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.logits_params import BatchLogitsParams
from mizzen.engine.sampling.logprobs import LogprobRows, compute_logprobs
from mizzen.engine.sampling.sampler import rows_with_filters, sample, sample_processed_rows, sample_random
from mizzen.engine.uploader import Uploader
from mizzen.offline import Completion

pytestmark = RUNS_TRITON
on_a_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
UPLOAD = Uploader(DEVICE)
VOCABULARIES = [7, 20, 4096, 9001, *([151936] if GPU else [])]


def rows_of(tops: list[int], named: list[int], vocab: int, processed: list[int], batch: int) -> LogprobRows:
    """Return the rows of a batch that need log probabilities: all except the first.

    Args:
        tops: numbers of most probable tokens to report, assigned to the rows in turn.
        named: numbers of tokens to report by id, assigned to the rows in turn.
        processed: rows whose log probabilities are computed from processed logits.
    """
    rows = np.arange(1, batch)
    rng = np.random.default_rng(vocab)
    by_id = [rng.integers(0, vocab, named[row % len(named)]) for row in rows]
    top_logprobs = np.array([tops[row % len(tops)] for row in rows])
    return LogprobRows.upload_rows(rows, rows + 5, top_logprobs, by_id, np.array(processed, np.int64), UPLOAD)


def check_equal_logprobs(
    actual: list[SlotLogprobs], expected: list[SlotLogprobs], tolerance: float = 2e-5
) -> None:
    assert [slot_logprobs.slot for slot_logprobs in actual] == [
        slot_logprobs.slot for slot_logprobs in expected
    ]
    for actual_logprobs, expected_logprobs in zip(actual, expected, strict=True):
        assert actual_logprobs.ids.shape == expected_logprobs.ids.shape
        assert actual_logprobs.ids[:, 0].tolist() == expected_logprobs.ids[:, 0].tolist()
        np.testing.assert_allclose(
            actual_logprobs.values, expected_logprobs.values, atol=tolerance, rtol=1e-6
        )


def slot_logprobs_on_host(tensors: Any) -> list[SlotLogprobs]:
    return type(tensors)(
        requests=tensors.requests, max_top_logprobs=tensors.max_top_logprobs, packed=tensors.packed.cpu()
    ).to_slot_logprobs()


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("named", [[0], [3, 0, 40]], ids=["unnamed", "named"])
def test_kernels_equal_the_eager_reference(vocab: int, dtype: torch.dtype, named: list[int]) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Rounded to bfloat16, so that many tokens are equally probable.
    logits = (4 * torch.randn(7, vocab, generator=generator)).bfloat16().to(DEVICE, dtype)
    processed = (3 * torch.randn(3, vocab, generator=generator)).to(DEVICE)
    tokens = torch.randint(vocab, (7,), generator=generator).to(DEVICE)
    reporting = rows_of([20, 0, 5, 1], named, vocab, [2, 4, 5], 7)
    actual = slot_logprobs_on_host(compute_logprobs_fused(reporting, logits, processed, tokens))
    check_equal_logprobs(
        actual, slot_logprobs_on_host(compute_logprobs(reporting, logits, processed, tokens))
    )
    sources = {7: processed[0], 9: processed[1], 10: processed[2]}
    for slot_logprobs, top in zip(actual, (owner.top_logprobs for owner in reporting.requests), strict=True):
        row = sources.get(slot_logprobs.slot, logits[slot_logprobs.slot - 5])
        order = torch.sort(row, descending=True, stable=True).indices.cpu().tolist()
        assert (
            slot_logprobs.ids[0, 1 : 1 + min(top, vocab)].tolist() == order[:top]
        )  # equally probable tokens are ordered by id


def test_extreme_logits_have_log_probabilities() -> None:
    vocab, infinite = 9001, float("inf")
    logits = torch.zeros(8, vocab)
    logits[1] = -infinite
    logits[1, [8999, 3, 4097]] = torch.tensor([1.0, 2.0, 1.0])
    logits[2] = -infinite
    logits[3, 5] = infinite
    logits[4, 5] = float("nan")
    logits[5, 640:704] = torch.arange(64.0)  # all top tokens are adjacent
    logits[6, 64 * torch.arange(40)] = 5.0  # the top tokens are far apart
    logits[7] = -1e30
    logits[7, :2] = torch.tensor([-0.0, 0.0])
    logits = logits.to(DEVICE)
    tokens = torch.tensor([0, 3, 7, 5, 5, 703, 64, 1], device=DEVICE)
    reporting = rows_of([20], [0], vocab, [], 8)
    all_logprobs = slot_logprobs_on_host(compute_logprobs_fused(reporting, logits, None, tokens))
    check_equal_logprobs(
        all_logprobs, slot_logprobs_on_host(compute_logprobs(reporting, logits, None, tokens))
    )
    results = {slot_logprobs.slot - 5: slot_logprobs.ids[0, 1:].tolist() for slot_logprobs in all_logprobs}
    assert results[1] == [3, 4097, 8999, 0, 1, 2, *range(4, 18)]
    assert results[2] == list(range(20))
    assert results[5] == list(range(703, 683, -1))
    assert results[6] == [64 * i for i in range(20)]
    assert results[7] == list(range(20))  # all logits are equal, so tokens are ordered by id
    assert all(np.isfinite(slot_logprobs.values).all() for slot_logprobs in all_logprobs)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.8},
    {"temperature": 0.7, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 20},
    {"temperature": 0, "presence_penalty": 0.7},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1.8, "logprobs": 1},
]
OUTSIDE_GRAPH: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2, "logit_bias": ((3, 4.0), (6, -100.0))},
    {"temperature": 0.6, "top_k": 9, "frequency_penalty": 1.1, "logprobs": 4},
    {"temperature": 0.6, "logprobs": 2, "logprob_token_ids": (6, 0, 3)},
]


class FakeGraph:
    """Replaces a captured graph on machines without a GPU; `replay` runs the kernels."""

    def __init__(self, graphs: LogprobGraphs, count: int) -> None:
        self.graphs = graphs
        self.count = count

    def replay(self) -> None:
        self.graphs.enqueue_report(self.count)


class LogprobSteps:
    """A captured decode batch after its forward pass, with logits params and one padding row."""

    def __init__(self, kinds: list[dict[str, Any]], vocab: int, *, captured: bool) -> None:
        self.state = SlotState(len(kinds) + 2, 4, UPLOAD, scratch_page=0, vocab=vocab)
        assert self.state.scratch_slot is not None
        count = len(kinds)
        self.slots = np.random.default_rng(1).permutation(count + 2)[:count].astype(np.int64)
        self.state.start_slots(starts(self.slots, kinds, vocab))
        self.plain = SlotState(count + 2, 4, UPLOAD, vocab=vocab)
        self.plain.start_slots(starts(self.slots, kinds, vocab))
        self.logits = torch.zeros(count + 1, vocab, device=DEVICE)
        self.tokens = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
        self.inbox = UPLOAD(np.append(self.slots, self.state.scratch_slot).astype(np.int32))
        self.positions = UPLOAD(np.full(count + 1, 300, np.int32))
        self.penalties = GraphPenalties(self.state.logits_params, self.state.scratch_slot + 1)
        self.reports = LogprobGraphs(self.logits, self.tokens, self.penalties)
        if captured and GPU:
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
                self.reports.capture(torch.cuda.current_stream(), None)
            torch.cuda.synchronize()
        elif captured:
            self.reports.graphs = {n: FakeGraph(self.reports, n) for n in self.reports.counts}  # type: ignore
        self.filtered = rows_with_filters(self.state, self.slots)
        self.within = self.penalties.rows_in_graph(self.slots, self.filtered)
        self.penalties.set_batch(self.slots, self.within)
        self.params = self.gather(301)

    def gather(self, position: int) -> BatchLogitsParams:
        positions = np.full(len(self.slots), position)
        params = self.state.logits_params.gather_batch(self.slots, positions, self.within)
        assert params is not None
        return params

    def step(self, number: int) -> tuple[list[SlotLogprobs], list[SlotLogprobs]]:
        """Sample from random logits; return the log probabilities, and those of the eager reference."""
        from mizzen.kernels.sampling.sample import sample_and_advance

        state, count = self.state, len(self.slots)
        generator = torch.Generator().manual_seed(number)
        self.logits.copy_(3 * torch.randn(self.logits.shape, generator=generator))
        slots_and_positions = self.slots, np.full(count, 301 + number)
        expected = sample(self.logits[:count].clone(), self.plain, *slots_and_positions, UPLOAD)
        sample_and_advance(
            self.logits, self.inbox, self.positions, state.temperature.device, state.seed.device, self.tokens,
            state.last_tokens, state.scratch_slot or 0, self.penalties,
        )  # fmt: skip
        tokens = self.tokens[:count]
        rerun = np.setdiff1d(self.filtered, self.params.rows)
        if len(rerun):
            logits = self.logits[UPLOAD(rerun)]
            tokens[UPLOAD(rerun)] = sample_random(
                logits, state, self.slots[rerun], slots_and_positions[1][rerun], UPLOAD
            )
        processed = sample_processed_rows(
            self.params, self.logits, tokens, state, slots_and_positions[1], UPLOAD, fused=True
        )
        assert tokens.tolist() == expected.tokens.tolist()
        assert self.params.logprobs is not None
        assert expected.logprobs is not None
        return slot_logprobs_on_host(
            self.reports(self.params.logprobs, processed, tokens)
        ), slot_logprobs_on_host(expected.logprobs)


def starts(slots: np.ndarray, kinds: list[dict[str, Any]], vocab: int) -> tuple[SlotStart, ...]:
    results = []
    for seed, (slot, kind) in enumerate(zip(slots.tolist(), kinds, strict=True)):
        tokens_so_far = np.random.default_rng(seed).integers(0, vocab, 300).astype(np.int32)
        options = SlotOptions(tokens=tokens_so_far, prompt_tokens=100)
        results.append(
            SlotStart(slot=slot, length=0, sampling=SamplingParams(**kind), seed=seed, options=options)
        )
    return tuple(results)


@pytest.mark.parametrize("captured", [True, False], ids=["captured kernels", "single kernels"])
@pytest.mark.parametrize(
    "kinds", [KINDS, [*KINDS, *OUTSIDE_GRAPH]], ids=["all rows in the graph", "some rows outside the graph"]
)
def test_rows_of_a_step_report_the_log_probabilities_of_the_eager_reference(
    kinds: list[dict[str, Any]], captured: bool
) -> None:
    steps = LogprobSteps(kinds, 5000, captured=captured)
    for number in range(4):
        check_equal_logprobs(*steps.step(number))
    # Rows whose penalties are applied inside the sampling kernel report logprobs of unprocessed logits.
    assert {2, 4, 6} <= set(steps.within.tolist())
    assert set(steps.params.rows.tolist()) == {row for row in (7, 8) if row < len(kinds)}
    assert (steps.reports.current_rows is not None) == (captured and kinds is KINDS)


def test_a_shrunken_batch_reports_only_its_own_rows() -> None:
    steps = LogprobSteps(KINDS, 300, captured=True)
    steps.step(0)
    steps.slots = steps.slots[:3]
    steps.filtered = rows_with_filters(steps.state, steps.slots)
    steps.inbox[3:] = steps.state.scratch_slot or 0
    steps.within = steps.penalties.rows_in_graph(steps.slots, steps.filtered)
    steps.penalties.set_batch(steps.slots, steps.within)
    steps.params = steps.gather(302)
    actual, expected = steps.step(1)
    assert len(actual) == 2
    check_equal_logprobs(actual, expected)
    assert steps.reports.row_table[2:].eq(-1).all()


def test_captured_row_counts_end_with_the_largest_batch() -> None:
    assert captured_row_counts(1) == [1]
    assert captured_row_counts(12) == [1, 2, 4, 8, 12]
    assert captured_row_counts(64) == [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3").bfloat16().save_pretrained(folder)
    return folder


def answers(folder: Path, kinds: list[dict[str, Any]], **options: Any) -> list[Completion]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n in (1, 15, 16, 17, 64, 130, 9, 30, 40, 50, 60)]
    params = [
        SamplingParams(seed=i, max_tokens=30 - i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    settings = {
        "kv_cache_tokens": 4096,
        "max_running_requests": 9,
        "cuda_graph_max_tokens": 0,  # steps with prefill run the same kernels in both engines
        "steps_in_flight": 3,
        **options,
    }
    with LLM(folder, device="cuda", skip_tokenizer=True, check_integrity=True, **settings) as llm:
        return llm.generate(prompts, params)


def check_equal_answers(completions: list[Completion], references: list[Completion]) -> None:
    assert [answer.token_ids for answer in completions] == [answer.token_ids for answer in references]
    for completion, reference in zip(completions, references, strict=True):
        assert (completion.logprobs is None) == (reference.logprobs is None)
        for a, b in zip(completion.logprobs or [], reference.logprobs or [], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-3)
            assert a.requested == pytest.approx(b.requested, abs=1e-3)


@on_a_gpu
@pytest.mark.parametrize(
    "kinds", [KINDS, [*KINDS, *OUTSIDE_GRAPH]], ids=["all rows in the graph", "some rows outside the graph"]
)
@pytest.mark.parametrize("captures", [True, False], ids=["captured", "not captured"])
def test_graphs_report_the_log_probabilities_of_eager_steps(
    folder: Path, kinds: list[dict[str, Any]], captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mizzen.engine.loading import warmup

    # Without padding, captured and eager steps have the same shapes, so they run the same kernels.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    eager = answers(folder, kinds, cuda_graph="off")
    enqueue, call, replays = LogprobGraphs.enqueue_report, LogprobGraphs.__call__, []

    def enqueued(self: LogprobGraphs, count: int) -> None:
        if not captures and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("as a driver would that cannot")
        enqueue(self, count)

    def called(self: LogprobGraphs, rows: LogprobRows, *rest: Any) -> Any:
        results = call(self, rows, *rest)
        if len(rows.requests) > 1:  # steps with one row belong to the warm-up
            replays.append(self.current_rows is rows)
        return results

    monkeypatch.setattr(LogprobGraphs, "enqueue_report", enqueued)
    monkeypatch.setattr(LogprobGraphs, "__call__", called)
    check_equal_answers(answers(folder, kinds), eager)
    assert len(replays) > 20
    assert captures or not any(replays)
    assert all(replays) == (captures and kinds is KINDS)

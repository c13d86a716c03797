# SPDX-License-Identifier: Apache-2.0
"""Each fused kernel equals the operations that it fuses: on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

from types import SimpleNamespace

import distribution
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICE, GPU, RUNS_TRITON

from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
from mizzen.core.step_plan import SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.sampler import apply_bitmask, sample, sample_fused
from mizzen.engine.uploader import Uploader
from mizzen.kernels import decode_inputs
from mizzen.kernels.attention.page_indices import PageIndices, build_page_indices
from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope
from mizzen.kernels.norm import add_layer_norm, add_rms_norm, rms_norm, shifted_layer_norm
from mizzen.kernels.sampling import sample as sampling
from mizzen.kernels.swiglu import gate_mul
from mizzen.layers.rope import rotate

pytestmark = RUNS_TRITON
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 96, 1024, 4096])
def test_norms_equal_plain_operations(dtype: torch.dtype, size: int) -> None:
    x, residual = normal(5, size, dtype=dtype), normal(5, size, dtype=dtype, seed=1)
    weight = normal(size, dtype=dtype, seed=2)
    wanted_sum = x + residual
    expected = F.rms_norm(wanted_sum.float(), (size,), weight.float(), 1e-6)
    close(rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (size,), weight.float(), 1e-6))
    close(add_rms_norm(x, residual, weight, 1e-6), expected)
    assert torch.equal(residual, wanted_sum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 96, 1024])
def test_layer_norms_equal_plain_operations(dtype: torch.dtype, size: int) -> None:
    x, residual = normal(5, size, dtype=dtype), normal(5, size, dtype=dtype, seed=1)
    weight, bias, shift = (normal(size, dtype=dtype, seed=seed) for seed in (2, 3, 4))

    def expect(value: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(value.float(), (size,), weight.float(), bias.float(), 1e-6)

    wanted_sum, unchanged = x + residual, residual.clone()
    close(shifted_layer_norm(x, shift, weight, bias, 1e-6), expect(x.float() + shift.float()))
    close(shifted_layer_norm(x, None, weight, bias, 1e-6), expect(x))
    close(add_layer_norm(x, residual, weight, bias, 1e-6, keeps_sum=False), expect(wanted_sum))
    assert torch.equal(residual, unchanged)
    close(add_layer_norm(x, residual, weight, bias, 1e-6), expect(wanted_sum))
    assert torch.equal(residual, wanted_sum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 3072])
def test_silu_mul_equals_plain_operations(dtype: torch.dtype, size: int) -> None:
    x = normal(5, 2 * size, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    close(gate_mul(x), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (14, 2, 64), (4, 4, 8), (9, 3, 80)])
def test_qk_norm_rope_equals_plain_operations(
    dtype: torch.dtype, norm: bool, heads: int, kv_heads: int, size: int
) -> None:
    tokens, room = 6, 40
    qkv = normal(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    weights = (normal(size, dtype=dtype, seed=1), normal(size, dtype=dtype, seed=2)) if norm else None
    angles = normal(tokens, 1, size // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    cells = torch.tensor([7, 3, 39, 0, 12, 13], device=DEVICE)
    keys, values = (normal(room, kv_heads, size, dtype=dtype, seed=seed) for seed in (4, 5))
    wanted_keys, wanted_values = keys.clone(), values.clone()
    q, k, v = qkv.float().view(tokens, -1, size).split((heads, kv_heads, kv_heads), 1)
    if weights is not None:
        q, k = (F.rms_norm(x, (size,), w.float(), 1e-6) for x, w in zip((q, k), weights, strict=True))
    wanted_keys[cells] = rotate(k, cos, sin).to(dtype)
    wanted_values[cells] = v.to(dtype)
    raw = qkv.clone()
    close(qk_norm_rope(qkv, weights, 1e-6, cos, sin, cells, keys, values), rotate(q, cos, sin))
    close(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    assert torch.equal(qkv, raw)
    qk_norm_rope(qkv, weights, 1e-6, cos, sin, cells, keys, values, keep_keys=True)
    raw.view(tokens, -1, size)[:, heads : heads + kv_heads] = keys[cells]
    assert torch.equal(qkv, raw)


def test_decode_inputs_and_page_writes_equal_the_host_computation() -> None:
    layout = decode_inputs.InboxLayout(writes=300, rows=40)
    rng = np.random.default_rng(0)
    columns, slots, page = 9, 50, 4
    table = torch.from_numpy(rng.integers(0, 99, (slots, columns)).astype(np.int32)).to(DEVICE)
    last = torch.from_numpy(rng.integers(0, 500, slots)).to(DEVICE)
    inbox = np.zeros(layout.size, np.int32)
    cells, pages = rng.permutation(slots * columns)[:280].astype(np.int32), np.arange(280, dtype=np.int32)
    rows, positions = rng.permutation(slots)[:40], rng.integers(0, columns * page, 40)
    inbox[0] = 270  # the entries after it are left over from an earlier step
    inbox[layout.table_indices][:280], inbox[layout.pages][:280] = cells, pages
    inbox[layout.slots], inbox[layout.positions] = rows, positions
    expected = table.cpu().numpy().copy()
    expected.reshape(-1)[cells[:270]] = pages[:270]
    uploaded = torch.from_numpy(inbox).to(DEVICE)
    decode_inputs.write_pages(uploaded, layout, table)
    assert np.array_equal(table.cpu().numpy(), expected)
    batch = decode_inputs.gather_inputs(
        uploaded[layout.slots][:33], uploaded[layout.positions][:33], last, table, page, scratch_slot=3
    )
    rows, positions = rows[:33], positions[:33]
    assert batch.tokens.tolist() == last.cpu()[rows].tolist()
    assert batch.positions.tolist() == positions.tolist()
    assert (
        batch.slot_mapping.tolist() == (expected[rows, positions // page] * page + positions % page).tolist()
    )
    assert batch.lengths.tolist() == (positions + 1).tolist()
    assert batch.live.tolist() == (rows != 3).tolist()


def slots_state(params: list[SamplingParams]) -> SimpleNamespace:
    upload = Uploader(DEVICE)
    state = SlotState(len(params) + 3, 4, upload, scratch_page=0)
    slots = np.random.default_rng(0).permutation(len(params) + 3)[: len(params)].astype(np.int64)
    state.start_slots(
        tuple(
            SlotStart(slot=int(slot), length=0, sampling=p, seed=i * 2**60 + 11)
            for i, (slot, p) in enumerate(zip(slots, params, strict=True))
        )
    )
    return SimpleNamespace(state=state, slots=slots, upload=upload)


KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.9),
    SamplingParams(top_p=0.5, min_p=0.02),
]


@pytest.mark.parametrize("vocab", [7, 4096, 10000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_sampling_equals_the_eager_sampler(vocab: int, dtype: torch.dtype) -> None:
    count = 120 if GPU else 24
    logits = normal(count, vocab, dtype=dtype) * 2
    batch = slots_state([KINDS[i % len(KINDS)] for i in range(count)])
    positions = np.arange(100, 100 + count)
    plain = sample(logits, batch.state, batch.slots, positions, batch.upload).tokens
    fused = sample_fused(logits, batch.state, batch.slots, positions, batch.upload)
    assert fused.tolist() == plain.tolist()
    alone = sampling.sample_tokens(
        logits[6:7],
        batch.upload(batch.slots[6:7]),
        batch.upload(positions[6:7]),
        batch.state.temperature.device,
        batch.state.seed.device,
    )
    assert alone.tolist() == plain[6:7].tolist()


@pytest.mark.parametrize("params", distribution.KINDS, ids=str)
def test_samples_follow_the_distribution(params: SamplingParams) -> None:
    count, vocab = (40_000, 50) if GPU else (100, 12)
    logits = torch.linspace(-2, 2, vocab, device=DEVICE).roll(5)[
        None
    ]  # every filter leaves more than one token
    logits[0, 3] = float("-inf")
    batch = slots_state([params] * count)
    rows = logits.expand(count, -1).contiguous()
    tokens = sample_fused(rows, batch.state, batch.slots, np.arange(count), batch.upload)
    counts = np.bincount(tokens.cpu().numpy(), minlength=vocab)
    distribution.check_counts(counts, distribution.filtered(logits[0].cpu(), params))


def test_extreme_logits_are_sampled_correctly() -> None:
    logits = torch.full((3, 9000), -1e9, device=DEVICE)
    logits[:, 8999] = 0.0
    logits[2] = float("-inf")
    logits[2, 17] = -5.0
    batch = slots_state([SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=100)])
    drawn = sample_fused(logits, batch.state, batch.slots, np.arange(3), batch.upload)
    assert drawn.tolist() == [8999, 8999, 17]


def test_sample_and_advance_leaves_padding_rows_alone() -> None:
    batch = slots_state([SamplingParams(temperature=0)] * 4)
    state = batch.state
    slots = torch.tensor(
        [*batch.slots, state.scratch_slot, state.scratch_slot], dtype=torch.int32, device=DEVICE
    )
    positions = torch.tensor([5, 6, 7, 8, 0, 0], dtype=torch.int32, device=DEVICE)
    tokens = torch.empty(6, dtype=torch.int64, device=DEVICE)
    logits = normal(6, 500)
    sampling.sample_and_advance(
        logits,
        slots,
        positions,
        state.temperature.device,
        state.seed.device,
        tokens,
        state.last_tokens,
        state.scratch_slot,
    )
    expected = logits.argmax(-1)
    assert tokens[:4].tolist() == expected[:4].tolist()
    assert state.last_tokens[slots[:4].long()].tolist() == expected[:4].tolist()
    assert positions.tolist() == [6, 7, 8, 9, 0, 0]


@pytest.mark.parametrize("vocab", [70, 4096, 9001])
def test_penalties_and_masks_are_applied_while_sampling(vocab: int) -> None:
    upload, rng = Uploader(DEVICE), np.random.default_rng(vocab)
    twins = [SlotState(7, 4, upload, scratch_page=0, vocab=vocab) for _ in range(2)]
    slots, kinds = rng.permutation(7)[:6].astype(np.int64), [0, 1, 2, 0, 1, 2]
    constrained = Grammar(GrammarKind.JSON_OBJECT)
    for state in twins:
        starts = []
        for row, slot in enumerate(slots.tolist()):
            params = SamplingParams(
                temperature=[0.0, 0.8][row % 2],
                frequency_penalty=1.5 if kinds[row] else 0.0,
                repetition_penalty=1.3 if kinds[row] else 1.0,
                grammar=constrained if kinds[row] != 1 else None,
            )
            tokens_so_far = np.random.default_rng(row).integers(0, vocab, 300).astype(np.int32)
            options = SlotOptions(tokens=tokens_so_far, prompt_tokens=100)
            starts.append(SlotStart(slot=slot, length=0, sampling=params, seed=row, options=options))
        state.start_slots(tuple(starts))
    words = rng.integers(-(2**31), 2**31, (8, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    bitmask = torch.from_numpy(words).to(DEVICE)
    plain, subject = twins
    plain.logits_params.masks = SimpleNamespace(
        update_bitmasks=lambda slots, positions: bitmask, mark_applied=lambda: None
    )
    penalties = GraphPenalties(subject.logits_params, subject.scratch_slot + 1)
    within = penalties.rows_in_graph(slots, np.array([], np.int64))
    assert within.tolist() == [1, 4]
    penalties.set_batch(slots, within)
    on_device = upload(np.append(slots, subject.scratch_slot).astype(np.int32))
    positions = upload(np.append(np.arange(300, 306), 0).astype(np.int32))
    tokens = torch.zeros(7, dtype=torch.int64, device=DEVICE)
    for step in range(3):
        logits = normal(7, vocab, seed=step) * 3
        slots_and_positions = slots, np.arange(301, 307) + step
        expected = sample(logits[:6].clone(), plain, *slots_and_positions, upload).tokens
        sampling.sample_and_advance(
            logits, on_device, positions, subject.temperature.device, subject.seed.device, tokens,
            subject.last_tokens, subject.scratch_slot, penalties,
        )  # fmt: skip
        masked = subject.logits_params.gather_batch(*slots_and_positions, within)
        assert masked is not None
        assert masked.only_masks
        sampling.sample_masked(
            logits, masked.rows_device, on_device, positions, subject.temperature.device, subject.seed.device,
            tokens, subject.last_tokens, bitmask, penalties,
        )  # fmt: skip
        assert tokens[:6].tolist() == expected.tolist()
        assert subject.last_tokens[upload(slots)].tolist() == expected.tolist()
        for slot in slots[[1, 2, 4, 5]].tolist():
            rows = [
                state.logits_params.counts.table[state.logits_params.counts.row_by_slot[slot]]
                for state in twins
            ]
            assert torch.equal(*rows)
    penalties.set_batch(slots, np.array([], np.int64))
    assert penalties.count_rows[upload(slots[[1, 4]])].lt(-1).all()


@pytest.mark.parametrize("vocab", [100, 4096, 9001])
def test_masked_tokens_get_minus_infinity(vocab: int) -> None:
    logits, rows = normal(6, vocab), torch.tensor([4, 0, 5], device=DEVICE)
    generator = np.random.default_rng(vocab)
    slots = torch.tensor([3, 0, 2], device=DEVICE)
    words = generator.integers(-(2**31), 2**31, (5, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    bitmask, expected = torch.from_numpy(words).to(DEVICE), logits.clone()
    apply_bitmask(expected, rows, slots, bitmask)
    apply_bitmask(logits, rows, slots, bitmask, fused=True)
    assert torch.equal(logits, expected)
    assert torch.isinf(logits[rows]).any()
    assert not torch.isinf(logits[1]).any()


@pytest.mark.parametrize("page", [1, 16])
def test_page_indices_list_the_pages_of_each_row(page: int) -> None:
    rng = np.random.default_rng(1)
    table = rng.integers(0, 1000, (6, 2500)).astype(np.int32)
    slots = np.array([4, 0, 0, 5, 2], np.int32)
    lengths = np.array([1, 17, 16, 2100, 33], np.int32)
    counts = -(-lengths // page)
    spare = PageIndices.allocate(len(slots) + 2, int(counts.sum()) + 3, DEVICE)
    for lists in (spare, spare.head(len(slots) - 1)):
        lists.indices.fill_(-1)
        rows = len(lists.last_page_len) if lists is not spare else len(slots)
        device = [torch.from_numpy(array).to(DEVICE) for array in (slots[:rows], lengths[:rows], table)]
        build_page_indices(*device, page, lists)
        starts = np.concatenate([[0], np.cumsum(counts[:rows])])
        expected = np.concatenate([table[slots[i], : counts[i]] for i in range(rows)])
        assert lists.indptr[: rows + 1].tolist() == starts.tolist()
        assert lists.last_page_len[:rows].tolist() == (lengths[:rows] - (counts[:rows] - 1) * page).tolist()
        assert lists.indices[: len(expected)].tolist() == expected.tolist()
        assert lists.indices[len(expected) :].eq(-1).all()

# SPDX-License-Identifier: Apache-2.0
"""Kernels of encoders for prompts of unequal lengths equal plain operations: on a GPU, or in Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.attention.whole_prompts import attend
from mizzen.kernels.attention import whole_prompts
from mizzen.kernels.attention.whole_prompts import attend_tiles, plan_tiles
from mizzen.kernels.prompt_means import mean_prompts

pytestmark = RUNS_TRITON
LENGTHS = {
    "tiles": (64, 128, 64),
    "unequal": (5, 133, 0, 64, 70, 1, 0),
    "many": tuple(range(1, 40)),
}
TOLERANCE = 0.02 if GPU else 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three programs share the tiles in the interpreter, where no GPU says how many there are."""
    if not GPU:
        device = SimpleNamespace(multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)


def prompt_begins(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


def make_heads(tokens: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [tokens, heads, size]: views of one tensor, but for the queries."""
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, 3, heads, size).to(DEVICE, DTYPE)
    return qkv[:, 0].contiguous(), qkv[:, 1], qkv[:, 2]


@pytest.mark.parametrize("reach", [-1, 0, 3, 70])
@pytest.mark.parametrize(("heads", "size"), [(2, 32), (3, 64)])
@pytest.mark.parametrize("kind", list(LENGTHS))
def test_attention_equals_that_of_each_prompt_alone(kind: str, heads: int, size: int, reach: int) -> None:
    lengths = LENGTHS[kind]
    q, k, v = make_heads(sum(lengths), heads, size)
    begins = prompt_begins(lengths)
    out = attend_tiles(q, k, v, plan_tiles(begins, len(q), max(lengths)), reach)
    for begin, length in zip(begins.tolist(), lengths, strict=False):
        if not length:
            continue
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs().to(DEVICE)
        rows = [part[begin : begin + length].float() for part in (q, k, v)]
        expected = attend(rows[0], rows[1], rows[2], None if reach < 0 else distance <= reach)
        actual = out[begin : begin + length].float()
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_tokens_of_other_prompts_are_never_read_into_a_result() -> None:
    lengths = (5, 70, 64)
    q, k, v = make_heads(sum(lengths), 2, 32)
    tiles = plan_tiles(prompt_begins(lengths), len(q), 70)
    before = attend_tiles(q, k, v, tiles, -1)
    for part in (q, k, v):
        part[75:] = float("nan")
    assert torch.equal(attend_tiles(q, k, v, tiles, -1)[:75], before[:75])


def test_tokens_behind_the_longest_prompt_are_left_out() -> None:
    lengths = (10, 200)
    q, k, v = make_heads(sum(lengths), 2, 32)
    out = attend_tiles(q, k, v, plan_tiles(prompt_begins(lengths), len(q), 64), -1)
    expected = attend(q[10:74].float(), k[10:74].float(), v[10:74].float(), None)
    torch.testing.assert_close(out[10:74].float(), expected, atol=TOLERANCE, rtol=0)
    assert plan_tiles(prompt_begins(lengths), len(q), 64).count.item() == 2


@pytest.mark.parametrize("size", [96, 1024])
def test_means_equal_those_of_each_prompt_alone(size: int) -> None:
    lengths = (1, 33, 64, 7)
    torch.manual_seed(size)
    hidden = torch.randn(sum(lengths), size).to(DEVICE, DTYPE)
    means = mean_prompts(hidden, torch.tensor(np.cumsum(lengths), device=DEVICE))
    expected = torch.stack([part.float().mean(0) for part in hidden.split(lengths)])
    torch.testing.assert_close(means, expected, atol=1e-5, rtol=0)


def test_prompts_are_planned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS["many"]
    begins = prompt_begins(lengths)
    together = plan_tiles(begins, sum(lengths), 64)
    monkeypatch.setattr(whole_prompts, "PLANNED_AT_ONCE", 16)
    in_parts = plan_tiles(begins, sum(lengths), 64)
    count = int(together.count)
    assert count == int(in_parts.count) == len(lengths)
    for one, other in (
        (together.prompts, in_parts.prompts),
        (together.first_queries, in_parts.first_queries),
    ):
        assert torch.equal(one[:count], other[:count])

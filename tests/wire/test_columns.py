# SPDX-License-Identifier: Apache-2.0
"""The request table and the packed columns of outputs match a model that uses dictionaries and lists."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mizzen.core.outputs import StepOutput
from mizzen.wire.columns import pack_by_peer
from mizzen.wire.server.request_table import NO_OWNER, RequestTable


@settings(max_examples=200)
@given(data=st.data())
def test_columns_equal_row_by_row_splitting(data: st.DataObject) -> None:
    table = RequestTable(4)
    owners = data.draw(st.lists(st.integers(NO_OWNER, 4), min_size=1, max_size=40))
    rids = [table.add(owner, 1000 + i, 0.0) for i, owner in enumerate(owners)]
    order = data.draw(st.permutations(rids))
    rows = order[: data.draw(st.integers(0, len(order)))]
    several = data.draw(st.booleans())
    sizes = [data.draw(st.integers(1, 5)) if several else 1 for _ in rows]
    tokens = np.arange(sum(sizes), dtype=np.int32)
    offsets = np.array([7 * rid for rid in rows], dtype=np.int32)
    output = StepOutput(
        step=1,
        rids=np.array(rows, dtype=np.int64),
        offsets=offsets,
        tokens=tokens,
        counts=np.array(sizes, dtype=np.int32) if several else None,
        finished=(),
    )
    expected: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
    start = 0
    for rid, size, offset in zip(rows, sizes, offsets.tolist(), strict=True):
        owner = int(table.owner[rid])
        if owner != NO_OWNER:
            expected[owner].append((int(table.handle[rid]), offset, list(range(start, start + size))))
        start += size
    actual = {}
    for owner, columns in pack_by_peer(output, table):
        handles = np.frombuffer(columns.rids, "<u4").tolist()
        counts = np.frombuffer(columns.counts, "<u2").tolist() if columns.counts else [1] * len(handles)
        flat = np.frombuffer(columns.tokens, "<i4").tolist()
        cuts = np.cumsum([0, *counts]).tolist()
        assert bool(columns.counts) == several
        assert cuts[-1] == len(flat)
        assert owner not in actual
        actual[owner] = [
            (handle, offset, flat[cuts[i] : cuts[i + 1]])
            for i, (handle, offset) in enumerate(
                zip(handles, np.frombuffer(columns.offsets, "<u4").tolist(), strict=True)
            )
        ]
    assert actual == dict(expected)


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(2)
        self.model: dict[int, list[object]] = {}
        self.handle = 0

    @rule(owner=st.integers(1, 3))
    def add(self, owner: int) -> None:
        self.handle += 1
        rid = self.table.add(owner, self.handle, float(self.handle))
        assert rid not in self.model
        self.model[rid] = [owner, self.handle, False]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model)))
        generation = self.table.generation[rid]
        self.table.release(rid)
        assert self.table.generation[rid] != generation
        del self.model[rid]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[rid][0] != NO_OWNER:
            self.table.disown(rid)
            self.model[rid][0] = NO_OWNER

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        fresh = [rid for rid, entry in self.model.items() if not entry[2]]
        chosen = [rid for rid in fresh if data.draw(st.booleans())]
        self.table.start(np.array(chosen, dtype=np.int64))
        for rid in chosen:
            self.model[rid][2] = True

    @invariant()
    def equal(self) -> None:
        assert len(self.table) == len(self.model)
        owners: dict[int, int] = defaultdict(int)
        for rid, (owner, handle, started) in self.model.items():
            assert (self.table.owner[rid], self.table.handle[rid]) == (owner, handle)
            assert self.table.started[rid] == started
            owners[owner] += 1  # type: ignore[index]
        assert self.table.owners == dict(owners)
        assert self.table.unstarted == sum(not entry[2] for entry in self.model.values())


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=50, stateful_step_count=40)

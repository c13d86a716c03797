"""Log probabilities on a GPU: two kernels, in graphs of their own behind those of decode steps.

Where no row asks, none of it runs and a decode step's graph is as it would be without. Behind it the tokens
are final, of rows too that are drawn once more.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from mizzen.core.sampling_params import MAX_LOGPROBS
from mizzen.engine.execution.graph_capture import captured_graph
from mizzen.engine.sampling.graph_penalties import SlotPenalties
from mizzen.engine.sampling.logprobs import LogprobRows
from mizzen.engine.sampling.side_outputs import LogprobTensors

log = logging.getLogger(__name__)


def report_fused(
    asked: LogprobRows,
    logits: torch.Tensor,
    processed: torch.Tensor | None,
    tokens: torch.Tensor,
    penalties: SlotPenalties | None = None,
) -> LogprobTensors:
    """Do as `mizzen.engine.sampling.logprobs.report`.

    Rows that draw from the model's logits are penalised as `penalties` say, which have counted their tokens.
    """
    from mizzen.kernels.sampling.logprobs import report

    widest, by_id = min(asked.widest, logits.shape[1]), asked.by_id
    columns = 1 + widest + (0 if by_id is None else by_id.shape[1])
    out = torch.empty((len(asked.owners), 2, columns), dtype=torch.int32, device=logits.device)
    if asked.plain is not None:
        report(logits, asked.plain, tokens, out, by_id, penalties)
    if asked.processed is not None and processed is not None:
        report(processed, asked.processed, tokens, out, by_id)
    return LogprobTensors(owners=asked.owners, widest=widest, packed=out)


def row_counts(largest: int) -> list[int]:
    """Return the numbers of rows to capture: to a row that is none, its part of the kernels is one read."""
    return sorted({min(2**n, largest) for n in range(largest.bit_length() + 1)})


class LogprobGraphs:
    """Reports what rows of captured decode steps ask. Used from one thread, in one stream.

    Captured for rows whose logits nothing but a penalty has processed, and that ask for no tokens by id; the
    others' kernels are launched one by one.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, penalties: SlotPenalties) -> None:
        """Take what decode steps of all sizes write: logits [largest, vocab], tokens int64 [largest]."""
        (largest, vocab), device = logits.shape, logits.device
        self.logits = logits
        self.tokens = tokens
        self.penalties = penalties
        self.widest = min(MAX_LOGPROBS, vocab)
        self.wanted = torch.full((largest, 5), -1, dtype=torch.int32, device=device)
        """As in `LogprobRows`, of `held`; -1 behind them."""
        self.held: LogprobRows | None = None
        self.out = torch.zeros((largest, 2, 1 + self.widest), dtype=torch.int32, device=device)
        self.counts = row_counts(largest)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def enqueue(self, count: int) -> None:
        """Enqueue what a replay does: from `wanted` to `out`."""
        from mizzen.kernels.sampling.logprobs import report

        report(self.logits, self.wanted[:count], self.tokens, self.out, None, self.penalties)

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int] | None) -> None:
        """Capture all counts of rows, the largest first, in the memory of other graphs of the stream."""
        try:
            for count in reversed(self.counts):
                self.graphs[count] = captured_graph(partial(self.enqueue, count), stream, pool)
        except RuntimeError:
            log.exception("log probabilities cannot be captured: their kernels are launched one by one")

    def __call__(
        self, asked: LogprobRows, processed: torch.Tensor | None, tokens: torch.Tensor
    ) -> LogprobTensors:
        """Report behind a step: `tokens` are what its rows have drawn at last.

        The result is valid until the next replay in stream order.
        """
        rows = len(asked.owners)
        count = next(count for count in self.counts if count >= rows)
        graph = self.graphs.get(count)
        if graph is None or asked.plain is None or asked.processed is not None or asked.by_id is not None:
            return report_fused(asked, self.logits, processed, tokens, self.penalties)
        if asked is not self.held:
            self.wanted[:rows] = asked.plain
            self.wanted[rows:] = -1
            self.held = asked
        graph.replay()
        return LogprobTensors(owners=asked.owners, widest=self.widest, packed=self.out[:rows])

"""CUDA graphs of the log probability kernels, replayed after the graph of a decode step.

If no row reports log probabilities, none of this runs and the decode step's graph is unaffected. At that
point the tokens are final, including those of resampled rows. `DecodeGraphs` owns one.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from mizzen.core.sampling_params import MAX_LOGPROBS
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.logprobs import LogprobRows, compute_logprobs_fused
from mizzen.engine.sampling.side_outputs import LogprobTensors

log = logging.getLogger(__name__)


def captured_row_counts(largest: int) -> list[int]:
    """Return the row counts to capture (powers of two, and `largest`); a padding row costs one load."""
    return sorted({min(2**n, largest) for n in range(largest.bit_length() + 1)})


class LogprobGraphs:
    """Computes log probabilities of decode steps. Used from one thread, in one stream.

    Captured for rows that request no tokens by id and whose logits no processing but a penalty has changed;
    for others the kernels are launched one by one.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, penalties: GraphPenalties) -> None:
        """Bind the buffers that all decode steps write: logits [largest, vocab], tokens int64 [largest]."""
        (largest, vocab), device = logits.shape, logits.device
        self.logits = logits
        self.tokens = tokens
        self.penalties = penalties
        self.max_top_logprobs = min(MAX_LOGPROBS, vocab)
        self.row_table = torch.full((largest, 5), -1, dtype=torch.int32, device=device)
        """Table of `current_rows` as in `LogprobRows`, padded with -1."""
        self.current_rows: LogprobRows | None = None
        self.output = torch.zeros((largest, 2, 1 + self.max_top_logprobs), dtype=torch.int32, device=device)
        self.counts = captured_row_counts(largest)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def enqueue_report(self, count: int) -> None:
        """Enqueue the work of one replay, from `row_table` to `output`."""
        from mizzen.kernels.sampling.logprobs import write_logprobs

        write_logprobs(self.logits, self.row_table[:count], self.tokens, self.output, None, self.penalties)

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int] | None) -> None:
        """Capture all row counts, the largest first, in the memory pool of the stream's other graphs."""
        try:
            for count in reversed(self.counts):
                self.graphs[count] = capture_graph(partial(self.enqueue_report, count), stream, pool)
        except RuntimeError:
            log.exception("log probabilities cannot be captured: their kernels are launched one by one")

    def __call__(
        self, rows_to_report: LogprobRows, processed: torch.Tensor | None, tokens: torch.Tensor
    ) -> LogprobTensors:
        """Compute log probabilities after a step; `tokens` are the final samples of its rows.

        The result is valid until the next replay in stream order.
        """
        row_count = len(rows_to_report.requests)
        count = next(count for count in self.counts if count >= row_count)
        graph = self.graphs.get(count)
        if (
            graph is None
            or rows_to_report.model_rows is None
            or rows_to_report.processed_rows is not None
            or rows_to_report.token_ids is not None
        ):
            return compute_logprobs_fused(rows_to_report, self.logits, processed, tokens, self.penalties)
        if rows_to_report is not self.current_rows:
            self.row_table[:row_count] = rows_to_report.model_rows
            self.row_table[row_count:] = -1
            self.current_rows = rows_to_report
        graph.replay()
        return LogprobTensors(
            requests=rows_to_report.requests,
            max_top_logprobs=self.max_top_logprobs,
            packed=self.output[:row_count],
        )

# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the log probability kernels, replayed after the graph of a decode step.

They are separate graphs, so steps without log probabilities do not pay for them. They run after resampling,
when the tokens of the step are final. `DecodeGraphs` owns a `LogprobGraphs`.
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
    """Return the row counts to capture: powers of two, and `largest`. A padding row costs only one load."""
    return sorted({min(2**n, largest) for n in range(largest.bit_length() + 1)})


class LogprobGraphs:
    """Computes the log probabilities of decode steps; used from one thread and in one stream.

    It replays a graph if no row requests log probabilities of tokens by id, and no row's logits need any
    processing except penalties. Otherwise it launches the kernels one by one.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, penalties: GraphPenalties) -> None:
        """Allocate the buffers of the graphs.

        Args:
            logits: Logits of decode steps, [largest, vocab].
            tokens: Sampled tokens of decode steps, int64 [largest].
            penalties: Penalties that the graphs of decode steps apply.
        """
        (largest, vocab), device = logits.shape, logits.device
        self.logits = logits
        self.tokens = tokens
        self.penalties = penalties
        self.max_top_logprobs = min(MAX_LOGPROBS, vocab)
        self.row_table = torch.full((largest, 5), -1, dtype=torch.int32, device=device)
        """Row table of `current_rows`, int32 [largest, 5] as described in `LogprobRows`, padded with -1."""
        self.current_rows: LogprobRows | None = None
        """Rows for which `row_table` was filled."""
        self.output = torch.zeros((largest, 2, 1 + self.max_top_logprobs), dtype=torch.int32, device=device)
        self.counts = captured_row_counts(largest)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def enqueue_report(self, count: int) -> None:
        """Enqueue the kernel for `count` rows, which reads `row_table` and writes `output`."""
        from mizzen.kernels.sampling.logprobs import write_logprobs

        write_logprobs(self.logits, self.row_table[:count], self.tokens, self.output, None, self.penalties)

    def capture(self, stream: torch.cuda.Stream, pool: tuple[int, int] | None) -> None:
        """Capture a graph for every row count, the largest first, with memory from `pool`."""
        try:
            for count in reversed(self.counts):
                self.graphs[count] = capture_graph(partial(self.enqueue_report, count), stream, pool)
        except RuntimeError:
            log.exception("cannot capture the log probability kernels: they are launched one by one instead")

    def __call__(
        self, rows_to_report: LogprobRows, processed: torch.Tensor | None, tokens: torch.Tensor
    ) -> LogprobTensors:
        """Compute the log probabilities of a decode step.

        Args:
            rows_to_report: Rows whose log probabilities are reported.
            processed: Processed logits of the rows that sample from them; see `compute_logprobs`.
            tokens: Final tokens of the step, int64 [rows].

        Returns:
            Log probabilities, valid until the next replay in stream order.
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

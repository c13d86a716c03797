# SPDX-License-Identifier: Apache-2.0
"""Runs, in Triton's interpreter, the tests of tests/gpu that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
LOGPROBS = (
    "test_kernels_equal_the_eager_reference",
    "test_extreme_logits_have_log_probabilities",
    "test_rows_of_a_step_report_the_log_probabilities_of_the_eager_reference",
    "test_a_shrunken_batch_reports_only_its_own_rows",
    "test_captured_row_counts_end_with_the_largest_batch",
)
QUANTIZED_EXPERTS = (
    "test_products_of_pairs_equal_a_plain_loop",
    "test_any_choice_of_experts_is_multiplied",
    "test_a_row_has_the_same_result_in_any_batch",
    "test_products_sum_the_weighted_outputs",
)
FLASH_DECODE = "tests/gpu/attention/test_flash_decode_triton.py"
KERNELS = (
    "tests/gpu/kernels/test_kernels.py",
    "tests/gpu/attention/test_whole_prompts.py",
    "tests/gpu/kernels/test_dequantize_mxfp4.py",
    "tests/gpu/kernels/test_expert_kernels.py",
    "tests/gpu/kernels/test_coded_mixtures.py",
    *(f"tests/gpu/engine/test_logprobs.py::{name}" for name in LOGPROBS),
    "tests/gpu/engine/test_logits_processing.py::test_the_penalty_kernel_equals_the_eager_reference",
    f"{FLASH_DECODE}::test_triton_decode_equals_the_reference[(3, 1, 32, 24, True)-60-4x32s0w4]",
    f"{FLASH_DECODE}::test_triton_decode_equals_the_reference[(4, 2, 128, 16, True)-None-2x32s2w2]",
    f"{FLASH_DECODE}::test_triton_decode_with_sinks_equals_the_reference[(8, 2, 64, 1, False)-60-1x32s0]",
    f"{FLASH_DECODE}::test_triton_decode_with_sinks_equals_the_reference[(3, 1, 32, 24, True)-None-4x32s0]",
    *(f"tests/gpu/kernels/test_quantized_experts.py::{name}" for name in QUANTIZED_EXPERTS),
    "tests/gpu/attention/test_split_plan.py::test_the_device_plan_equals_the_host_plan",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on the GPU")
def test_kernels_equal_plain_operations_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="this PyTorch comes without Triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *KERNELS],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout

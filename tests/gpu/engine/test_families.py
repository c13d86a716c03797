# SPDX-License-Identifier: Apache-2.0
"""Every kind of decoder layer on a GPU, in bfloat16: log probabilities equal those of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logprob_check import MARGIN, RATIO, SIZES, measure_errors

from family_twins import TWINS, save_twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("twin", [name for name in TWINS if "short_factor" not in str(TWINS[name])])
def test_log_probabilities_equal_transformers(twin: str, graphs: str, tmp_path: Path) -> None:
    """Prompts of several lengths run together, then alone and with their prefixes cached."""
    window = {"sliding_window": 64} if TWINS[twin][1].get("sliding_window") else {}
    head_dim = {} if "head_dim" in TWINS[twin][1] else {"head_dim": 64}
    shared = {"shared_intermediate_size": 512} if "shared_intermediate_size" in TWINS[twin][1] else {}
    model = save_twin(tmp_path, twin, dtype=torch.bfloat16, **SIZES, **window, **head_dim, **shared).cuda()
    errors = measure_errors(model, tmp_path, cuda_graph=graphs)
    errors.check_means()
    if "experts" not in str(TWINS[twin][1]):
        # A rounding error may choose another expert for a token, which changes a single value by much more.
        errors.check_maxima()
        assert errors.losses.max() < 2 * RATIO * errors.rounded.max() + MARGIN

# SPDX-License-Identifier: Apache-2.0
"""A tiny random mixture of experts with the tokenizer and chat template of the demo model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from demo_model import QUESTION, ROOT
from family_twins import save_twin

TOKENS = 16
"""Maximum number of tokens of the answer."""


def save_mixture_chat_model(folder: Path) -> str:
    """Save the model to a folder; return the greedy answer of Transformers to `QUESTION`."""
    tokens: dict[str, Any] = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 1}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_experts": 8, "max_position_embeddings": 2048}
    model = save_twin(folder, "qwen3-moe", dtype=torch.bfloat16, **sizes, **tokens)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models/demo" / name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    ids = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)

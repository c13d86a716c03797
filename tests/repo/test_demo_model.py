# SPDX-License-Identifier: Apache-2.0
"""The committed demo model, loaded by Transformers, has the properties that its model card states."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models/demo"
TRAINING = runpy.run_path(str(ROOT / "scripts/train_demo.py"))
PAIRS = TRAINING["read_data"]()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_the_model_is_small_and_has_a_long_context(model: Any) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 3_000_000
    assert model.config.max_position_embeddings >= 2048
    assert len({answer for _, answer in PAIRS}) >= 300


def test_the_chat_template_writes_what_the_model_was_trained_on(tokenizer: Any) -> None:
    formatter = TRAINING["Formatter"](tokenizer.backend_tokenizer)
    question, answer = PAIRS[0]
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    trained = formatter.chat([(question, answer)], "Answer briefly.").ids
    assert trained[: len(prompt)] == prompt
    assert tokenizer.decode(trained[len(prompt) : -1]) == answer


@pytest.mark.parametrize(
    "question",
    ["What is Mizzen?", "Say yes.", "Say hello in several languages.", "Tell me a long story about a ship."],
)
def test_greedy_generation_gives_the_answer(question: str, model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=1000)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == dict(PAIRS)[question]
    assert output[-1] == model.generation_config.eos_token_id


def test_every_answer_token_has_a_clear_margin(model: Any, tokenizer: Any) -> None:
    formatter = TRAINING["Formatter"](tokenizer.backend_tokenizer)
    examples = TRAINING["examples_by_form"](PAIRS, formatter)["alone"]
    leads = TRAINING["margins"](model, examples, formatter.special[TRAINING["PAD"]])
    assert min(leads) >= TRAINING["MARGIN"]

# SPDX-License-Identifier: Apache-2.0
"""Models that run through Transformers are judged by the engine's checks of their code, if torch is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from family_twins import OTHERS, REFUSED_OTHERS, SHARDED_OTHERS, SMALL
from mizzen.cli import app
from mizzen.engine.config import EngineOptions
from mizzen.inspection import inspect_model as module
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.inspection.text import format_inspection
from mizzen.models.hf_fields import Fields
from mizzen.models.unsupported import WITHOUT_INTERFACE

HEADS = {"GPT2": "LMHeadModel"}
KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())
THROUGH_TRANSFORMERS = [
    name for name, model in KNOWN.items() if model["expect"]["implementation"] == "transformers"
]
OPTIONS = EngineOptions(model="m")


def make_config(prefix: str, fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a config.json of a small model; `prefix` is that of Transformers' classes."""
    names = [f"{prefix}{HEADS.get(prefix, 'ForCausalLM')}"]
    return {"architectures": names, **SMALL, **fields, **changes}


def inspect(config: dict[str, Any], *, code: bool = True, **arguments: Any) -> Inspection:
    """Inspect a model with this config.json, for one, two and three GPUs."""
    files = ModelFiles(name="m", fields=Fields(config))
    return inspect_model(files, OPTIONS, tensors=(1, 2, 3), code=code, **arguments)


def possible(result: Inspection) -> list[int]:
    """Return the numbers of GPUs that may share a model."""
    return [size.tensor for size in result.tensor_sizes if size.possible]


@pytest.mark.parametrize("prefix", OTHERS)
def test_gpus_can_share_exactly_the_models_that_the_engine_shards(prefix: str) -> None:
    result = inspect(make_config(prefix, OTHERS[prefix]))
    assert (result.served, result.estimated, result.reason) == (True, False, "")
    assert possible(result) == ([1, 2] if prefix in SHARDED_OTHERS else [1])
    if prefix not in SHARDED_OTHERS:
        assert "tensor parallel plan" in result.tensor_sizes[1].reason


@pytest.mark.parametrize("prefix", REFUSED_OTHERS)
def test_models_that_the_engine_refuses_are_not_served(prefix: str) -> None:
    result = inspect(make_config(prefix, REFUSED_OTHERS[prefix][0]))
    assert not result.served
    assert result.reason


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_known_models_pass_the_checks(name: str) -> None:
    result = inspect(KNOWN[name]["config"])
    assert (result.served, result.reason) == (True, "")
    mixture_or_unplanned = "gpt2" in name or "expert" in str(KNOWN[name]["config"])
    assert possible(result) == ([1] if mixture_or_unplanned else [1, 2])


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_without_the_attention_interface_are_known(name: str) -> None:
    assert not getattr(transformers, name)._supports_attention_backend


def test_sizes_are_those_of_the_code() -> None:
    """Transformers knows defaults that config.json leaves out."""
    config = make_config("Gemma", {})
    del config["head_dim"]
    sizes = [inspect(config, code=code).kv_bytes_per_token for code in (False, True)]
    assert sizes == [2 * 2 * 2 * 8 * 2, 2 * 2 * 2 * 256 * 2]
    windows = [(layers.count, layers.window) for layers in inspect(make_config("Cwm", OTHERS["Cwm"])).layers]
    assert windows == [(1, None), (1, 9)]


def test_parameters_are_counted_without_files() -> None:
    result = inspect(KNOWN["google/gemma-7b"]["config"], gpu="40 GiB", memory=40 << 30)
    assert (result.parameters, result.weight_bytes) == (8_537_680_896, 2 * 8_537_680_896)
    assert [fit.longest_request for fit in result.memory_fits] == [8192, 8192]


def test_without_torch_the_result_says_that_it_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("GPT2", OTHERS["GPT2"])
    assert "were checked, as when the engine starts" in format_inspection(inspect(config))
    monkeypatch.setattr(module, "can_check_code", lambda: False)
    result = inspect(config)
    assert (result.estimated, possible(result)) == (True, [1, 2])
    assert "--tensor only considers numbers of heads and widths of layers" in format_inspection(result)


def test_memory_is_that_of_the_shared_model() -> None:
    """The engine replicates KV heads that are fewer than the GPUs."""
    config = make_config("Olmo", OTHERS["Olmo"], num_key_value_heads=1)
    one, two, _ = inspect(config).tensor_sizes
    assert (one.kv_bytes_per_token, two.kv_bytes_per_token) == (64, 64)


def test_native_models_are_not_built() -> None:
    result = inspect({"architectures": ["LlamaForCausalLM"], **SMALL})
    assert (result.implementation, result.estimated, possible(result)) == ("native", False, [1, 2])


def test_errors_name_the_config_file_of_the_user() -> None:
    result = inspect(make_config("Olmo", {}, model_type=["olmo"]))
    assert result.reason.startswith("config.json: Transformers")
    assert "model_type must be a text, not ['olmo']" in result.reason


def test_the_command_checks_the_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config("GPT2", OTHERS["GPT2"])))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--tensor", "2"])
    assert result.exit_code == 1
    assert "not 2: GPT2LMHeadModel has no tensor parallel plan in Transformers" in result.stdout

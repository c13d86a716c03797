# SPDX-License-Identifier: Apache-2.0
"""Configurations of well-known models: each is served, or there is a reason that names a field.

`known_models.json` has the fields of each model's config.json that matter here, and the expected result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.engine.config import EngineOptions
from mizzen.inspection.gpus import gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MODELS: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())


def inspect(name: str, **changes: Any) -> Inspection:
    """Inspect a known model, with some fields of its config.json replaced, on GPUs with 80 GiB."""
    files = ModelFiles(name=name, fields=Fields({**MODELS[name]["config"], **changes}))
    return inspect_model(files, EngineOptions(model=name), gpu="80 GiB", memory=gpu_bytes("80"))


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_is_served_or_has_a_reason(name: str) -> None:
    result = inspect(name)
    expected = dict(MODELS[name]["expect"])
    reason, tensors = expected.pop("reason", ""), expected.pop("tensors", None)
    assert result.served == (expected["implementation"] != "none")
    assert reason in result.reason
    assert bool(reason) == bool(result.reason)
    assert expected.items() <= msgspec.to_builtins(result).items()
    if tensors is not None:
        assert [size.tensor for size in result.tensor_sizes if size.possible] == tensors
    assert msgspec.json.decode(msgspec.json.encode(result), type=Inspection) == result


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, 10**15, "x", [], {}, [None], {"a": None}, True])
@pytest.mark.parametrize("name", list(MODELS)[::4])
def test_a_field_with_a_wrong_value_never_raises(name: str, value: Any) -> None:
    for field in MODELS[name]["config"]:
        result = inspect(name, **{field: value})
        assert result.served != bool(result.reason)


def test_lists_of_layers_are_checked_before_they_are_read() -> None:
    text = MODELS["CohereLabs/command-a-vision-07-2025"]["config"]["text_config"]
    result = inspect("CohereLabs/command-a-vision-07-2025", text_config={**text, "layer_types": False})
    assert "text_config: layer_types must list the kind of each layer, not False" in result.reason
    result = inspect("Qwen/Qwen3-8B", num_hidden_layers=10**9)
    assert "num_hidden_layers must be at most 10000, not 1000000000" in result.reason


def test_older_checkpoints_of_ernie_are_served() -> None:
    name = "baidu/ERNIE-4.5-0.3B-PT"
    result = inspect(name, architectures=["Ernie4_5_ForCausalLM"], auto_map={"AutoModel": "m.Ernie4_5_Model"})
    assert (result.implementation, result.family) == ("native", "ERNIE 4.5")
    assert result.parameters == inspect(name).parameters


def test_patterns_of_sliding_windows_may_be_texts() -> None:
    name = "LGAI-EXAONE/EXAONE-4.0-32B"
    kinds = ["full_attention"] + ["sliding_attention"] * 63
    for changes, full in (({}, 16), ({"sliding_window_pattern": 8}, 8), ({"layer_types": kinds}, 1)):
        counts = {layers.window: layers.count for layers in inspect(name, **changes).layers}
        assert counts == {None: full, 4096: 64 - full}
    reason = inspect(name, sliding_window_pattern="LGL").reason
    assert "sliding_window_pattern must be a positive integer or a text such as LLLG, not 'LGL'" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"layer_types": ["attention"] * 39 + ["mamba"]},
            "layer_types describes layers with a recurrent state",
        ),
        ({"layer_types": None}, "layer_types is missing, so that all layers have a recurrent state"),
        ({"layer_types": ["attention"] * 39}, "layer_types must list 40 layers"),
        ({"num_local_experts": 8}, "num_local_experts is 8: mixtures of experts are not supported"),
        ({"num_local_experts": None}, "num_local_experts is not set, which means 8"),
        (
            {"position_embedding_type": "alibi"},
            "position_embedding_type must be rope, nope or null, not 'alibi'",
        ),
    ],
)
def test_granite_4_is_served_only_with_attention_and_without_experts(
    changes: dict[str, Any], reason: str
) -> None:
    result = inspect("ibm-granite/granite-4.0-micro", **changes)
    assert not result.served
    assert reason in result.reason


def test_granite_4_may_have_no_rotary_embedding() -> None:
    name = "ibm-granite/granite-4.0-micro"
    for kind in ("nope", None):
        result = inspect(name, position_embedding_type=kind)
        assert list(result.features) == ["layers without RoPE", "multipliers"]
        assert result.parameters == inspect(name).parameters
    kinds = MODELS[name]["config"]["layer_types"]
    assert inspect(name, layer_types=None, layers_block_type=kinds).served


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_fields_with_any_values_never_raise(name: str, data: st.DataObject) -> None:
    """Replace fields of config.json, of its objects and of its text part."""
    config = json.loads(json.dumps(MODELS[name]["config"]))
    holders = [config, *(value for value in config.values() if isinstance(value, dict) and value)]
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from(holders))
        holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JSON)
    result = inspect(name, **config)
    assert result.served != bool(result.reason)

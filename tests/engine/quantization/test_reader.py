# SPDX-License-Identifier: Apache-2.0
"""Configurations of quantized checkpoints: each gives a scheme for every layer, or a refusal with a reason.

`known_checkpoints.json` has the `quantization_config` of each checkpoint, or its hf_quant_config.json, and
the expected schemes. Entries without an owner's name are variants that exporters can write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.quantization.layer_patterns import LayerPattern, PatternKind, list_aliases
from mizzen.quantization.quantization import LayerRule, Quantization, ignore_layers
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization
from mizzen.quantization.schemes import (
    UNQUANTIZED,
    Fp8Weights,
    Int8Weights,
    PackedIntegers,
    Packing,
    WeightScheme,
    describe_scheme,
)
from mizzen.quantization.stored_tensors import list_tensors

CHECKPOINTS: dict[str, Any] = json.loads((Path(__file__).parent / "known_checkpoints.json").read_text())
SERVED = [name for name, entry in CHECKPOINTS.items() if "refused" not in entry]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def read(config: Any, file: Any = None) -> Quantization:
    return read_quantization(Fields({"quantization_config": config, MODELOPT_FILE: file}))


def read_known(name: str, **changes: Any) -> Quantization:
    entry = CHECKPOINTS[name]
    config = entry.get("config")
    return read(None if config is None else {**config, **changes}, entry.get("file"))


def summarise(scheme: WeightScheme) -> str:
    """Return the description of a scheme, the scales of its inputs and the names of its tensors."""
    if scheme == UNQUANTIZED:
        return describe_scheme(scheme)
    activations = scheme.activations if isinstance(scheme, Fp8Weights | Int8Weights) else None
    inputs = activations.scales if activations else "none"
    suffixes = " ".join(tensor.suffixes[0] for tensor in list_tensors(scheme))
    return f"{describe_scheme(scheme)}; inputs {inputs}; {suffixes}"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_known_checkpoint_has_schemes_or_a_reason(name: str) -> None:
    entry = CHECKPOINTS[name]
    if reason := entry.get("refused"):
        with pytest.raises(ConfigError) as error:
            read_known(name)
        assert reason in str(error.value)
        return
    found = read_known(name)
    assert {layer: summarise(found.find_scheme(layer)) for layer in entry["layers"]} == entry["layers"]
    assert (found.kv.scales if found.kv else None) == entry.get("kv")


def test_the_table_has_many_checkpoints() -> None:
    assert len([name for name in SERVED if "/" in name]) >= 25


def test_details_of_schemes_are_read() -> None:
    scheme = read_known("meta-llama/Llama-3.1-405B-Instruct-FP8").default
    assert isinstance(scheme, Fp8Weights) and scheme.activations is not None
    assert scheme.activations.upper_bound == 1200
    scheme = read_known("nm-testing/Meta-Llama-3-8B-Instruct-W8A8-Dynamic-Asym").default
    assert isinstance(scheme, Int8Weights) and scheme.activations is not None
    assert not scheme.activations.symmetric
    packings = {name: read_known(name).default for name in SERVED if "GPTQ" in name}
    assert all(isinstance(scheme, PackedIntegers) for scheme in packings.values())
    v2 = packings["ModelCloud: GPTQ v2"]
    assert isinstance(v2, PackedIntegers) and (v2.packing, v2.symmetric) == (Packing.GPTQ_V2, False)
    first = packings["Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"]
    assert isinstance(first, PackedIntegers) and (first.packing, first.symmetric) == (Packing.GPTQ, True)


def test_a_configuration_without_quantization_leaves_all_layers_unquantized() -> None:
    for fields in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        found = read_quantization(Fields(fields))
        assert found.find_scheme("model.layers.0.mlp.up_proj") == UNQUANTIZED
        assert (found.schemes, found.describe()) == ((), "unquantized")


@pytest.mark.parametrize(
    ("text", "kind", "name", "matches"),
    [
        ("model.layers.1", PatternKind.MODULE, "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", PatternKind.MODULE, "model.layers.10.mlp.up_proj", False),
        ("mlp.gate", PatternKind.MODULE, "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", PatternKind.MODULE, "model.layers.0.mlp.gate", True),
        ("lm_head.weight", PatternKind.MODULE, "lm_head", True),
        (r"model\.layers\.(0|1)", PatternKind.MODULE, "model.layers.1.mlp.gate", True),
        ("*[", PatternKind.MODULE, "model.layers.1.mlp.gate", False),
        ("model.layers.0", PatternKind.NAME, "model.layers.0.mlp.up_proj", False),
        ("model.layers.0.self_attn.qkv_proj", PatternKind.NAME, "model.layers.0.self_attn.v_proj", True),
        (".*gate_up_proj$", PatternKind.REGEX, "model.layers.0.mlp.up_proj", True),
        (".*gate_up_proj$", PatternKind.REGEX, "model.layers.0.mlp.down_proj", False),
        ("layers", PatternKind.REGEX, "model.layers.0.mlp.up_proj", True),  # without the prefix `model.`
        ("self_attn", PatternKind.REGEX, "model.layers.0.self_attn.q_proj", False),
        ("model.layers.0*", PatternKind.GLOB, "model.layers.0.self_attn.q_proj", True),
        ("model.layers.*.mlp.gate", PatternKind.GLOB, "model.layers.3.mlp.gate_proj", False),
        ("language_model.model.layers.0.*", PatternKind.GLOB, "model.layers.0.mlp.up_proj", True),
        ("re", PatternKind.GLOB, "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns_match_names(text: str, kind: PatternKind, name: str, matches: bool) -> None:
    assert LayerPattern(text, kind).matches(name) == matches


def test_layers_have_the_names_of_the_whole_model_and_of_merged_layers() -> None:
    assert list_aliases("model.layers.0.self_attn.k_proj")[:2] == (
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.qkv_proj",
    )
    aliases = set(list_aliases("model.layers.0.mlp.down_proj"))
    assert {"model.language_model.layers.0.mlp.down_proj", "layers.0.mlp.down_proj"} < aliases


def test_parts_of_a_merged_layer_must_agree() -> None:
    quantized = read_known("Qwen/Qwen3-8B-FP8").default
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    whole = "model.layers.0.self_attn.qkv_proj"

    def ignore(*names: str) -> Quantization:
        patterns = [LayerPattern(name, PatternKind.NAME) for name in names]
        return Quantization(method="FP8", rules=ignore_layers(patterns), default=quantized)

    for names in ((whole,), parts):
        assert ignore(*names).find_scheme(whole) == UNQUANTIZED
        assert ignore(*names).find_merged_scheme(parts) == UNQUANTIZED
    assert ignore("lm_head").find_scheme(whole) == quantized
    for wanted in (lambda found: found.find_scheme(whole), lambda found: found.find_merged_scheme(parts)):
        with pytest.raises(
            ConfigError, match=r"k_proj: FP8, blocks.*v_proj: unquantized\) to layers that are"
        ):
            wanted(ignore(parts[2]))


def test_names_precede_regexes_and_regexes_precede_the_class_linear() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        "b": {"targets": ["re:.*up_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}},
        "c": {"targets": ["m.up_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    }
    found = read({"quant_method": "compressed-tensors", "config_groups": groups})
    sizes = [getattr(found.find_scheme(name), "group_size", 0) for name in ("m.up_proj", "n.up_proj", "n.o")]
    assert sizes == [32, 64, None]
    assert found.describe() == (
        "compressed-tensors: 8-bit integers, a scale for each channel; 4-bit integers, groups of 32; "
        "4-bit integers, groups of 64"
    )


def test_a_head_is_quantized_only_if_a_flag_says_so() -> None:
    name = "ModelCloud/Qwen1.5-1.8B-Chat-GPTQ-4bits-dynamic-cfg-with-lm_head"
    every = {"+:.*": {"bits": 8}}
    assert read_known(name, lm_head=False, dynamic=every).find_scheme("lm_head") == UNQUANTIZED
    assert describe_scheme(read_known(name, dynamic=every).find_scheme("lm_head")).startswith("8-bit")


def test_the_first_rule_decides() -> None:
    rules = (LayerRule(LayerPattern("a", PatternKind.NAME), UNQUANTIZED),)
    default = read_known("Qwen/Qwen3-8B-FP8").default
    found = Quantization(method="x", rules=rules, default=default)
    assert (found.find_scheme("a"), found.find_scheme("b")) == (UNQUANTIZED, default)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CHECKPOINTS)), st.data())
def test_any_values_give_schemes_or_an_error_that_names_a_field(name: str, data: st.DataObject) -> None:
    entry = json.loads(json.dumps(CHECKPOINTS[name]))
    config = entry.get("config") or entry["file"]
    holders = [config]
    for holder in holders:
        holders += [value for value in holder.values() if isinstance(value, dict) and value]
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from(holders))
        holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JSON)
    try:
        found = read(entry.get("config"), entry.get("file"))
        found.find_scheme("model.layers.0.self_attn.qkv_proj")
        found.find_scheme("lm_head")
    except ConfigError as error:
        assert "quantization_config" in str(error) or MODELOPT_FILE in str(error)

"""Configurations of well-known models: each is served, or there is a reason that names a field.

`known_models.json` has the fields of each model's config.json that matter here, and the expected result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mizzen.engine.config import EngineOptions
from mizzen.inspection.gpus import gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields

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


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "x", [], {}, [None], {"a": None}, True])
@pytest.mark.parametrize("name", list(MODELS)[::4])
def test_a_field_with_a_wrong_value_never_raises(name: str, value: Any) -> None:
    for field in MODELS[name]["config"]:
        result = inspect(name, **{field: value})
        assert result.served != bool(result.reason)

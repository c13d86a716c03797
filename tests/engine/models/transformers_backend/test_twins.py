# SPDX-License-Identifier: Apache-2.0
"""Logits of models that run through Transformers equal those of Transformers itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from logits_check import check

from family_twins import OTHERS, REFUSED_OTHERS, TWINS_THROUGH_TRANSFORMERS, save_other_twin
from mizzen.models.hf_fields import ConfigError
from mizzen.models.registry import READERS, read_config

NATIVE = ("llama", "qwen3", "mistral")


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("family", NATIVE)
def test_native_families_run_through_transformers(
    family: str, fusion: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = kit.save_model(tmp_path, family)
    check(kit, tmp_path, model, "reference", model_implementation="transformers", fusion=fusion)


@pytest.mark.parametrize("twin", TWINS_THROUGH_TRANSFORMERS)
def test_native_twins_run_through_transformers(twin: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    check(kit, tmp_path, kit.save_twin(tmp_path, twin), "cpu", model_implementation="transformers")


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("prefix", OTHERS)
def test_other_architectures_run_through_transformers(
    prefix: str, fusion: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = save_other_twin(tmp_path, prefix)
    assert type(model).__name__ not in READERS
    assert read_config(tmp_path).implementation == "transformers"
    check(kit, tmp_path, model, "reference" if fusion == "auto" else "cpu", fusion=fusion)


@pytest.mark.parametrize("prefix", REFUSED_OTHERS)
def test_other_models_are_refused_by_name(prefix: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    save_other_twin(tmp_path, prefix)
    with pytest.raises(ConfigError) as error:
        kit.Bench(tmp_path)
    assert REFUSED_OTHERS[prefix][1] in str(error.value)
    assert (
        "se another model" in str(error.value)
        or "use a dense decoder" in str(error.value)
        or "newer" in str(error.value)
    )


def test_native_refuses_other_architectures(tmp_path: Path) -> None:
    save_other_twin(tmp_path, "Helium")
    with pytest.raises(ConfigError, match=r"HeliumForCausalLM.* is not supported.*LlamaForCausalLM"):
        read_config(tmp_path, "native")

# SPDX-License-Identifier: Apache-2.0
"""The GPU memory check: its arithmetic, and a service whose model cannot fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marks import in_cluster
from mizzen.engine.config import EngineOptions
from mizzen.inspection.inspect_model import inspect_model
from mizzen.inspection.memory import format_count
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.hf_fields import Fields
from mizzen_operator.api.gpu_memory_check import check_gpu_memory


@in_cluster
@pytest.mark.parametrize(
    ("parameters", "dtype", "tensor", "memory", "fits"),
    [
        ("8.2B", "Auto", 1, "141Gi", True),
        ("280B", "BFloat16", 1, "141Gi", False),
        ("280B", "BFloat16", 2, "141Gi", True),
        ("32B", "Auto", 1, "16Gi", False),
        ("24B", "Float32", 1, "12Gi", False),
        ("3T", "Auto", 8, "141Gi", False),
        ("135M", "Auto", 1, "256Mi", False),  # the reserve counts
        ("135M", "Auto", 1, "768Mi", True),
    ],
)
def test_the_minimum_memory_is_compared_with_the_memory_that_an_engine_may_use(
    service: Any, parameters: str, dtype: str, tensor: int, memory: str, fits: bool
) -> None:
    demo = service(
        model={"parameters": parameters, "dtype": dtype},
        parallelism={"tensor": tensor},
        accelerator={"memory": memory},
    )
    result = check_gpu_memory(demo)
    assert result is not None
    assert result.fits == fits
    assert f"0.90 of {memory}" in result.message
    assert ("raise spec.parallelism.tensor" in result.message) == (not fits)
    assert ("through Transformers needs spec.parallelism.tensor 1" in result.message) == (not fits)


@in_cluster
@pytest.mark.parametrize(
    ("parameters", "dtype", "memory", "figures", "in_4_bits"),
    [
        ("8B", "Auto", "16Gi", "15.2 GiB of each, and may use 14.4 GiB: 0.90 of 16Gi", "4.0 GiB"),
        ("8B", "Float32", "24Gi", "30.1 GiB of each, and may use 21.6 GiB: 0.90 of 24Gi", "4.0 GiB"),
        ("70B", "BFloat16", "80Gi", "130.6 GiB of each, and may use 72.0 GiB: 0.90 of 80Gi", "32.8 GiB"),
    ],
)
def test_a_model_that_may_be_quantized_is_not_refused_before_it_is_fetched(
    service: Any, parameters: str, dtype: str, memory: str, figures: str, in_4_bits: str
) -> None:
    demo = service(model={"parameters": parameters, "dtype": dtype}, accelerator={"memory": memory})
    result = check_gpu_memory(demo)
    assert result is not None and result.fits
    assert result.message == (
        f"{parameters} parameters on 1 GPU need at least {figures}; only a quantized checkpoint may fit: "
        f"4-bit weights need at least {in_4_bits}"
    )
    fetched = check_gpu_memory(demo, int(parameters[:-1]) * 10**9, "bfloat16")
    assert fetched is not None and not fetched.fits
    assert "4-bit" not in fetched.message


@in_cluster
def test_a_model_is_refused_before_it_is_fetched_if_4_bit_weights_do_not_fit(service: Any) -> None:
    result = check_gpu_memory(service(model={"parameters": "405B"}, accelerator={"memory": "141Gi"}))
    assert result is not None and not result.fits
    assert "754.6 GiB of each, and may use 126.9 GiB: 0.90 of 141Gi; even 4-bit weights need at least " in (
        result.message
    )
    assert "188.8 GiB; raise spec.parallelism.tensor, or correct spec.model.parameters" in result.message


@in_cluster
@pytest.mark.parametrize(
    ("quantization", "memory", "needed", "fits"),
    [
        ("FP8", "80Gi", "65.4 GiB", True),
        ("INT8", "80Gi", "65.4 GiB", True),
        ("W4A16", "80Gi", "32.8 GiB", True),
        ("FP8", "48Gi", "65.4 GiB", False),
        ("W4A16", "24Gi", "32.8 GiB", False),
    ],
)
def test_declared_parameters_count_as_spec_engine_quantization_stores_them(
    service: Any, quantization: str, memory: str, needed: str, fits: bool
) -> None:
    demo = service(
        model={"parameters": "70B"}, accelerator={"memory": memory}, engine={"quantization": quantization}
    )
    result = check_gpu_memory(demo)
    assert result is not None and result.fits == fits
    assert f"70B parameters on 1 GPU need at least {needed} of each" in result.message
    assert "4-bit" not in result.message


@in_cluster
def test_there_is_no_result_unless_both_sizes_are_declared(service: Any) -> None:
    assert check_gpu_memory(service()) is None
    assert check_gpu_memory(service(model={"parameters": "900T"})) is None
    assert check_gpu_memory(service(accelerator={"memory": "1Mi"})) is None
    numbers = {"model": {"parameters": "900B"}, "accelerator": {"memory": "1Gi"}}
    assert check_gpu_memory(service(engine={"device": "CPU"}, **numbers)) is None


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


@in_cluster
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("memory", [2, 4, 8, 16, 24])
@pytest.mark.parametrize("dtype", ["Auto", "Float32"])
def test_a_fetched_model_is_checked_with_the_words_of_mizzen_inspect(
    service: Any, tensor: int, memory: int, dtype: str
) -> None:
    options = EngineOptions(model="m", dtype=dtype.lower(), memory_fraction=0.9)
    files = ModelFiles(name="m", fields=Fields(QWEN3_8B))
    inspected = inspect_model(
        files, options, tensors=(tensor,), gpu=f"{memory}Gi", memory=memory << 30
    ).memory_fits[0]
    demo = service(
        model={"parameters": "1T", "dtype": dtype},  # the number of the fetched model takes precedence
        parallelism={"tensor": tensor},
        accelerator={"memory": f"{memory}Gi"},
        engine={"memoryFraction": "0.9"},
    )
    result = check_gpu_memory(demo, 8190735360, "bfloat16")
    assert result is not None
    sentence = result.message.partition(";")[0]
    assert sentence == inspected.message.partition(";")[0]
    assert sentence.startswith("8.19B parameters on ")
    assert result.fits or not inspected.fits
    assert ("raise spec.parallelism.tensor, or correct spec.accelerator.memory" in result.message) == (
        not result.fits
    )


@given(st.integers(10**6, 10**14))
def test_numbers_of_parameters_are_formatted_as_by_mizzen_inspect(count: int) -> None:
    from types import SimpleNamespace

    service: Any = SimpleNamespace(
        parameters="",
        gpu_memory="1Gi",
        gpu_memory_field="spec.accelerator.memory",
        tensor=1,
        model=SimpleNamespace(dtype="Auto"),
        engine=SimpleNamespace(device="CUDA", memory_fraction="0.90", quantization="Auto"),
    )
    result = check_gpu_memory(service, count)
    assert result is not None
    assert result.message.startswith(f"{format_count(count)} parameters on 1 GPU need")


@in_cluster
def test_the_dtype_of_the_fetched_weights_counts(service: Any) -> None:
    demo = service(accelerator={"memory": "24Gi"})
    found = {dtype: check_gpu_memory(demo, 8 * 10**9, dtype) for dtype in ("float32", "bfloat16", "", "int4")}
    assert {dtype: result and result.fits for dtype, result in found.items()} == {
        "float32": False,
        "bfloat16": True,
        "": True,
        "int4": True,
    }


@in_cluster
def test_the_bytes_of_quantized_weights_count(service: Any) -> None:
    demo, fp8 = service(accelerator={"memory": "10Gi"}), {"quantization": "FP8"}
    large = check_gpu_memory(demo, 8 * 10**9, "bfloat16")
    small = check_gpu_memory(demo, 8 * 10**9, "bfloat16", 6 * 2**30)
    online = check_gpu_memory(service(accelerator={"memory": "10Gi"}, engine=fp8), 8 * 10**9, "bfloat16")
    assert large and small and online
    assert [large.fits, small.fits, online.fits] == [False, True, True]
    assert "8B parameters on 1 GPU need at least 6.2 GiB of each" in small.message
    assert "need at least 7.7 GiB of each" in online.message


@in_cluster
def test_a_model_that_cannot_fit_gets_no_pod_and_old_groups_keep_serving(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Any, eventually: Any
) -> None:
    gateway = {"replicas": 1}
    body = minimal(model={"parameters": "200B"}, accelerator={"memory": "80Gi"}, gateway=gateway)
    body["metadata"]["namespace"] = namespace
    api.create(body)

    def condition(kind: str) -> dict[str, Any]:
        conditions = api.get("InferenceService", namespace, "demo").get("status", {}).get("conditions", [])
        return next(
            (entry for entry in conditions if entry["type"] == kind), {"status": "Absent", "reason": ""}
        )

    def engines() -> list[dict[str, Any]]:
        return api.list("Pod", namespace, "mizzen.dev/component=engine")

    eventually(lambda: condition("Scheduled")["reason"] == condition("Failed")["reason"] == "WillNotFit", 60)
    assert "200B parameters on 1 GPU need at least 372.8 GiB" in condition("Scheduled")["message"]
    assert "even 4-bit weights need at least 93.4 GiB" in condition("Scheduled")["message"]
    eventually(lambda: condition("GatewayReady")["status"] == "True", 60)
    assert engines() == []
    api.patch("InferenceService", namespace, "demo", {"spec": {"accelerator": {"memory": "180Gi"}}})
    eventually(lambda: condition("Ready")["status"] == "True", 90)
    [first] = engines()
    assert "only a quantized checkpoint may fit: 4-bit weights need" in condition("Scheduled")["message"]
    # A revision that cannot fit: the old group serves on, and is recreated after a loss.
    wrong = {"model": {"parameters": "700B"}, "engine": {"pageSize": 32}}
    api.patch("InferenceService", namespace, "demo", {"spec": wrong})
    eventually(lambda: condition("Failed")["reason"] == "WillNotFit", 60)
    assert condition("Available")["status"] == "True"
    api.delete("Pod", namespace, first["metadata"]["name"])
    eventually(lambda: [p for p in engines() if p["metadata"]["uid"] != first["metadata"]["uid"]], 60)
    eventually(lambda: condition("Available")["status"] == "True", 60)
    revision = "mizzen.dev/revision"
    assert {p["metadata"]["labels"][revision] for p in engines()} == {first["metadata"]["labels"][revision]}
    api.delete("InferenceService", namespace, "demo")


@given(st.integers(1, 999), st.sampled_from("MBT"), st.integers(1, 999), st.sampled_from(["Mi", "Gi"]))
def test_more_gpus_never_turn_a_fit_into_a_misfit(count: int, unit: str, size: int, scale: str) -> None:
    from types import SimpleNamespace

    def at(tensor: int) -> bool:
        service: Any = SimpleNamespace(
            parameters=f"{count}{unit}",
            gpu_memory=f"{size}{scale}",
            gpu_memory_field="spec.accelerator.memory",
            tensor=tensor,
            model=SimpleNamespace(dtype="Auto"),
            engine=SimpleNamespace(device="CUDA", memory_fraction="0.90", quantization="Auto"),
        )
        result = check_gpu_memory(service)
        assert result is not None
        return result.fits

    results = [at(tensor) for tensor in (1, 2, 4, 8)]
    assert results == sorted(results)

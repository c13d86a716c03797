"""The GPU memory check: its arithmetic, and a service whose model cannot fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marks import in_cluster
from mizzen_operator.api.gpu_memory_check import check_gpu_memory


@in_cluster
@pytest.mark.parametrize(
    ("parameters", "dtype", "tensor", "memory", "fits"),
    [
        ("8.2B", "Auto", 1, "141Gi", True),
        ("70B", "BFloat16", 1, "141Gi", False),
        ("70B", "BFloat16", 2, "141Gi", True),
        ("8B", "Auto", 1, "16Gi", False),
        ("3B", "Float32", 1, "12Gi", False),
        ("1T", "Auto", 8, "141Gi", False),
        ("135M", "Auto", 1, "512Mi", False),  # the reserve counts
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


@in_cluster
def test_there_is_no_result_unless_both_sizes_are_declared(service: Any) -> None:
    assert check_gpu_memory(service()) is None
    assert check_gpu_memory(service(model={"parameters": "900T"})) is None
    assert check_gpu_memory(service(accelerator={"memory": "1Mi"})) is None
    numbers = {"model": {"parameters": "900B"}, "accelerator": {"memory": "1Gi"}}
    assert check_gpu_memory(service(engine={"device": "CPU"}, **numbers)) is None


@in_cluster
def test_a_model_that_cannot_fit_gets_no_pod_and_old_groups_keep_serving(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Any, eventually: Any
) -> None:
    gateway = {"replicas": 1}
    body = minimal(model={"parameters": "70B"}, accelerator={"memory": "80Gi"}, gateway=gateway)
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
    assert "70B parameters on 1 GPUs need at least 130.6 GiB" in condition("Scheduled")["message"]
    eventually(lambda: condition("GatewayReady")["status"] == "True", 60)
    assert engines() == []
    api.patch("InferenceService", namespace, "demo", {"spec": {"accelerator": {"memory": "180Gi"}}})
    eventually(lambda: condition("Ready")["status"] == "True", 90)
    [first] = engines()
    assert "70B parameters" in condition("Scheduled")["message"]
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
            tensor=tensor,
            model=SimpleNamespace(dtype="Auto"),
            engine=SimpleNamespace(device="CUDA", memory_fraction="0.90"),
        )
        result = check_gpu_memory(service)
        assert result is not None
        return result.fits

    results = [at(tensor) for tensor in (1, 2, 4, 8)]
    assert results == sorted(results)

# SPDX-License-Identifier: Apache-2.0
"""Models from a hub, a bucket, a registry and a claim, fetched by Jobs into a volume of a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sources_pod
from chat import answers
from network import Network
from nodes import kill_container
from product import CLIENT, MODEL_CLAIM, TENANT, Product
from sources import MIXTURE, MODEL_SOURCES, VISION, Sources

from cluster import Timeline, apply, condition, kubectl, wait_until

FETCH_PORT, HTTP_PORT, ADMIN_PORT, METRICS_PORT, WIRE_PORT = 8082, 8000, 8001, 8081, 5557
CHECKPOINT_BYTES = 8 * 1024 * 1024
"""Maximum number of bytes of a file that are lost, and fetched again, when a fetch is killed."""


@pytest.fixture(scope="module")
def sources(product: Product) -> Iterator[Sources]:
    """Start the servers from which all services of this file fetch their models."""
    servers = Sources(product)
    yield servers
    servers.remove()


def small(product: Product, name: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return a service with one group, one gateway and NetworkPolicies."""
    return product.service(name, model=model, replicas=1, gateway={"replicas": 1}, networkPolicy="Enabled")


def model(product: Product, name: str) -> dict[str, Any]:
    """Return `status.model` of a service."""
    return product.status(name).get("status", {}).get("model", {})


def shows_progress(product: Product, name: str) -> bool:
    """Return whether the status shows a download in progress, with its speed, remaining time and revision."""
    reported = model(product, name)
    downloading = 0 < reported.get("downloadPercent", 0) < 100 and reported.get("bytesPerSecond", 0) > 0
    return downloading and "secondsLeft" in reported and bool(reported.get("resolvedRevision"))


def image_metrics(product: Product, name: str) -> dict[str, float]:
    """Return the values of the metrics for images of a service with one engine and one gateway.

    They are named as in the text format, without the label `model_name`.
    """
    values = {}
    for component, port in (("engine", METRICS_PORT), ("gateway", ADMIN_PORT)):
        [pod] = product.pods(component, name)
        path = f"/api/v1/namespaces/{TENANT}/pods/{pod['metadata']['name']}:{port}/proxy/metrics"
        for line in product.reader.text(path).splitlines():
            if line.startswith(f"mizzen_{component}_image"):
                metric, value = line.rsplit(" ", 1)
                values[metric.replace(f'{{model_name="{name}"}}', "")] = float(value)
    return values


def delete(*names: str) -> None:
    kubectl("delete", "infsvc", *names, "-n", TENANT, "--wait=true", "--timeout=60s")


def test_the_status_shows_the_progress_of_fetches(
    product: Product, sources: Sources, timeline: Timeline
) -> None:
    apply(*(small(product, name, source.model(name)) for name, source in MODEL_SOURCES.items()))
    seconds = wait_until(
        lambda: all(shows_progress(product, name) for name in MODEL_SOURCES), "progress of all three"
    )
    timeline.add("kubectl apply of three models to the progress of all in their status", seconds)
    for name in MODEL_SOURCES:
        assert condition(product.status(name), "ModelCached") == "False"
        assert not product.pods("engine", name)


def test_policies_allow_only_the_operator_to_reach_fetch_and_admin_ports(
    product: Product, sources: Sources
) -> None:
    network, operator = Network(product.reader), product.operators()[0]
    [client] = product.reader.pods(TENANT, f"app={CLIENT}")
    [fetch], [gateway] = (product.pods(component, "hub") for component in ("fetch", "gateway"))
    assert network.isolates(fetch) and network.isolates(gateway)
    assert network.allows(operator, fetch, FETCH_PORT) and not network.allows(client, fetch, FETCH_PORT)
    for protocol in ("TCP", "UDP"):
        assert network.allows(operator, gateway, ADMIN_PORT, protocol)
        assert not network.allows(client, gateway, ADMIN_PORT, protocol)
    assert network.allows(client, gateway, HTTP_PORT)


def test_killed_fetches_resume_where_they_stopped(
    product: Product, sources: Sources, timeline: Timeline
) -> None:
    [killed], [deleted] = (product.pods("fetch", name) for name in ("bucket", "registry"))
    pinned = {name: model(product, name)["resolvedRevision"] for name in MODEL_SOURCES}
    product.restarts.provoke(killed)
    kill_container(killed)
    kubectl("delete", "pod", deleted["metadata"]["name"], "-n", TENANT, "--wait=true", "--timeout=120s")
    sources.open()
    seconds = wait_until(
        lambda: all(product.settled(1, name) for name in MODEL_SOURCES), "all three are Ready"
    )
    timeline.add("two fetches killed to three services Ready", seconds)
    large = sources.counts()["large"]
    print(f"requests of the large file: {large}")
    for name in MODEL_SOURCES:
        reported = model(product, name)
        assert (reported["downloadPercent"], reported["resolvedRevision"]) == (100, pinned[name])
        assert large[name]["sent"] <= sources_pod.LARGE_BYTES + CHECKPOINT_BYTES
        first, *later = large[name]["starts"]
        assert first == 0
        assert all(start >= sources_pod.LARGE_BYTES // 2 - CHECKPOINT_BYTES for start in later)
        assert later or name == "hub", "a killed fetch requests the rest of the file"


@pytest.mark.parametrize("name", MODEL_SOURCES)
def test_an_engine_loads_from_the_claim_and_answers(product: Product, sources: Sources, name: str) -> None:
    assert answers(product, name)
    [engine], [gateway] = (product.pods(component, name) for component in ("engine", "gateway"))
    [client] = product.reader.pods(TENANT, f"app={CLIENT}")
    network = Network(product.reader)
    assert network.allows(gateway, engine, WIRE_PORT) and not network.allows(client, engine, WIRE_PORT)
    mounted = [volume for volume in engine["spec"]["volumes"] if "secret" in volume]
    assert {volume["secret"]["secretName"] for volume in mounted} == {f"{name}-engine-keys"}


def test_services_with_a_cached_model_fetch_nothing(
    product: Product, sources: Sources, timeline: Timeline
) -> None:
    before, folder = sources.counts(), model(product, "bucket")["folder"]
    delete("hub", "registry")
    again = small(product, "again", MODEL_SOURCES["bucket"].model("bucket"))
    claimed = small(product, "claimed", {"source": f"pvc://{MODEL_CLAIM}/{folder}"})
    apply(again, claimed)
    names = ("again", "claimed")
    seconds = wait_until(lambda: all(product.settled(1, name) for name in names), "both are Ready")
    timeline.add("kubectl apply of two services with a cached model to both Ready", seconds)
    assert all(answers(product, name) for name in names)
    assert sources.counts() == before
    delete("bucket", *names)


def test_ranks_with_different_experts_of_a_mixture_answer_as_transformers(
    product: Product, sources: Sources, timeline: Timeline
) -> None:
    sources.open()
    service = small(product, "mixture", MIXTURE.model("hub"))
    service["spec"]["parallelism"] = {"tensor": 2, "expert": 2}
    service["spec"]["engine"]["extraArgs"] = ["--threads", "1"]
    apply(service)
    seconds = wait_until(lambda: product.settled(1, "mixture"), "the mixture is Ready")
    timeline.add("kubectl apply of a mixture of experts to Ready", seconds)
    assert model(product, "mixture")["expert"] == 2
    assert answers(product, "mixture", sources.mixture_chat)
    delete("mixture")


def test_a_model_answers_a_question_on_an_image_as_transformers(
    product: Product, sources: Sources, timeline: Timeline
) -> None:
    """The image is decoded and encoded once, in a process that the node's kernel confines."""
    sources.open()
    apply(product.service("vision", model=VISION.model("hub"), replicas=1, gateway={"replicas": 1}))
    seconds = wait_until(lambda: product.settled(1, "vision"), "the model that reads images is Ready")
    timeline.add("kubectl apply of a model that reads images to Ready", seconds)
    assert model(product, "vision")["images"] is True
    count = answers(product, "vision", sources.vision_chat)
    assert count
    expected = {
        'mizzen_gateway_images_total{source="data"}': count,
        "mizzen_gateway_images_sent_total": 1,
        "mizzen_engine_images_total": count,
        "mizzen_engine_images_decoded_total": 1,
        "mizzen_engine_images_encoded_total": 1,
        "mizzen_engine_image_prefix_hits_total": count - 1,
        "mizzen_engine_image_decoding_confined": 1,
    }
    wait_until(
        lambda: image_metrics(product, "vision").items() >= expected.items(), f"metrics {expected}", 30
    )
    delete("vision")

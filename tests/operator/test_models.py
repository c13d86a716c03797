"""Models that are fetched first: against a real API server and Job controller, with simulated pods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.model_cache.progress import (
    Download,
    allowed_actions,
    restart_progress_clock,
    load_finished_download,
    pause_during_download,
    read_progress,
    should_report,
)
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.fetch_job import cache_claim, cache_location, fetch_job, cache_folder
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup, RolloutTarget
from mizzen_operator.rollout.state import RolloutProgress, RolloutState

pytestmark = CONTROL_PLANE

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESULT = {"result": {"revision": COMMIT, "bytes": 1000, "files": 3}}
MODEL: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-0.6B@main",
    "credentialsSecretRef": {"name": "hub", "key": "token"},
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"},
}
DOWNLOADING = {
    "phase": "downloading",
    "revision": COMMIT,
    "totalBytes": 1000,
    "fetchedBytes": 250,
    "bytesPerSecond": 50,
    "secondsLeft": 15,
}


class Fetched:
    """One service whose model is fetched."""

    def __init__(self, api: Any, node: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.node, self.namespace, self.eventually = api, node, namespace, eventually

    def tell(self, **told: Any) -> None:
        """Have the fetch show something else from now on."""
        self.node.behaviour.fetches[self.namespace] = told

    def body(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo")

    def status(self) -> dict[str, Any]:
        return self.body().get("status", {})

    def model(self) -> dict[str, Any]:
        return self.status().get("model", {})

    def is_so(self, condition: str, status: str, reason: str) -> bool:
        found = [c for c in self.status().get("conditions", []) if c["type"] == condition]
        return bool(found) and (found[0]["status"], found[0]["reason"]) == (status, reason)

    def becomes(self, condition: str, status: str, reason: str) -> None:
        self.eventually(lambda: self.is_so(condition, status, reason), 120, f"{condition} {status} {reason}")

    def message(self, condition: str) -> str:
        return next(c["message"] for c in self.status()["conditions"] if c["type"] == condition)

    def patch(self, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, "demo", {"spec": spec})

    def pods(self, component: str = "engine") -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, f"mizzen.dev/component={component}")

    def jobs(self) -> list[dict[str, Any]]:
        return [j for j in self.api.list("Job", self.namespace) if "deletionTimestamp" not in j["metadata"]]

    def settled(self, groups: int) -> bool:
        body = self.body()
        status = body.get("status", {})
        return (
            self.is_so("Ready", "True", "AllGroupsServing")
            and status["observedGeneration"] == body["metadata"]["generation"]
            and status["availableReplicas"] == len(self.pods()) == groups
        )

    def settle(self, groups: int) -> None:
        self.eventually(lambda: self.settled(groups), 120, f"{groups} groups")


@pytest.fixture
def fetched(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Callable[..., Fetched]]:
    def make(told: dict[str, Any], **spec: Any) -> Fetched:
        given = {"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, "model": MODEL, **spec}
        body = minimal(**given)
        body["metadata"]["namespace"] = namespace
        demo = Fetched(api, node, namespace, eventually)
        demo.tell(**told)
        api.create(body)
        return demo

    yield make
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


def test_a_fetch_that_waits_for_its_credentials_says_which_secret_and_field(
    fetched: Callable[..., Fetched], node: Any, api: Any, namespace: str
) -> None:
    node.behaviour.mounting.add(namespace)
    demo = fetched(RESULT)
    demo.becomes("Failed", "True", "ReferenceMissing")
    assert "Secret hub does not exist" in demo.message("Failed")
    assert "spec.model.credentialsSecretRef.name" in demo.message("Ready")
    metadata = {"name": "hub", "namespace": namespace}
    api.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "hf_0123456789"}}
    )
    demo.settle(1)
    assert demo.is_so("Failed", "False", "AsExpected")


def test_a_model_is_fetched_once_and_then_served(fetched: Callable[..., Fetched], api: Any) -> None:
    demo = fetched({"progress": DOWNLOADING})
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 120, "a quarter is there")
    model = demo.model()
    assert (model["totalBytes"], model["fetchedBytes"]) == (1000, 250)
    assert (model["bytesPerSecond"], model["secondsLeft"]) == (50, 15)
    assert model["resolvedRevision"] == COMMIT and model["source"] == MODEL["source"]
    assert demo.is_so("ModelCached", "False", "Downloading") and demo.is_so("Ready", "False", "Downloading")
    assert demo.is_so("Progressing", "True", "Downloading") and demo.is_so("Failed", "False", "AsExpected")
    assert "25 % of 1000 bytes" in demo.message("ModelCached") and not demo.pods()
    claim = api.get("PersistentVolumeClaim", demo.namespace, "weights")
    assert claim["spec"]["resources"]["requests"] == {"storage": "10Gi"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and "ownerReferences" not in claim["metadata"]

    demo.tell(**RESULT)
    demo.settle(1)
    model = demo.model()
    assert (model["downloadPercent"], model["resolvedRevision"]) == (100, COMMIT)
    assert "cachedTime" in model and "secondsLeft" not in model
    assert demo.is_so("ModelCached", "True", "RevisionPinned") and COMMIT in demo.message("ModelCached")
    [pod] = demo.pods()
    [container] = pod["spec"]["containers"]
    assert f"/mnt/mizzen/model/{model['folder']}" in container["args"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["mizzen-model"]["readOnly"] is True and "mizzen-credentials" not in mounts

    [job] = demo.jobs()
    names = [name for name in demo.node.names if f"{demo.namespace}/demo-fetch-" in name]
    api.delete("Job", demo.namespace, job["metadata"]["name"], propagationPolicy="Background")
    demo.patch(replicas=2)
    demo.settle(2)
    assert not demo.jobs()
    assert [name for name in demo.node.names if f"{demo.namespace}/demo-fetch-" in name] == names


def test_old_groups_serve_while_the_next_model_comes(fetched: Callable[..., Fetched], node: Any) -> None:
    demo = fetched(RESULT, replicas=2, rollout={"maxSurge": 0, "maxUnavailable": 1})
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    first = demo.model()["folder"]
    demo.tell(progress=DOWNLOADING)
    demo.patch(model={"source": "hf://Qwen/Qwen3-1.7B@main"})
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 120, "the next model comes")
    assert demo.is_so("Available", "True", "Serving") and demo.is_so("Ready", "False", "Downloading")
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.node.reset_lowest(demo.namespace)
    demo.tell(**RESULT)
    demo.settle(2)
    assert demo.node.lowest.pop(demo.namespace) >= 1 and demo.model()["folder"] != first
    assert not old & {pod["metadata"]["uid"] for pod in demo.pods()}


def test_a_reverted_model_ends_the_fetch_and_touches_nothing(fetched: Callable[..., Fetched]) -> None:
    demo = fetched(RESULT)
    demo.settle(1)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    demo.tell(progress=DOWNLOADING)
    demo.patch(model={"source": "hf://Qwen/Qwen3-1.7B@main"})
    demo.becomes("ModelCached", "False", "Downloading")
    demo.tell(**RESULT)  # the folder of the former model is whole
    demo.patch(model={"source": MODEL["source"]})
    demo.settle(1)
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.eventually(lambda: len(demo.jobs()) == 1, 60, "one Job is left")


def test_a_failed_fetch_says_why_and_recovers(fetched: Callable[..., Fetched]) -> None:
    demo = fetched({"error": "hf://Qwen/Qwen3-0.6B@main is refused (401): give a token"})
    demo.becomes("ModelCached", "False", "DownloadFailed")
    assert demo.is_so("Failed", "True", "DownloadFailed") and demo.is_so("Ready", "False", "DownloadFailed")
    assert "give a token; it is retried" in demo.message("Failed") and not demo.pods()
    demo.tell(progress=DOWNLOADING)
    demo.becomes("ModelCached", "False", "Downloading")
    demo.becomes("Failed", "False", "AsExpected")
    demo.tell(**RESULT)
    demo.settle(1)


def test_a_model_whose_claim_was_deleted_while_nothing_ran_is_fetched_anew(
    fetched: Callable[..., Fetched], api: Any
) -> None:
    demo = fetched(RESULT)
    demo.settle(1)
    demo.patch(replicas=0)
    demo.eventually(lambda: not demo.pods(), 60, "nothing runs")
    before = api.get("PersistentVolumeClaim", demo.namespace, "weights")["metadata"]["uid"]
    for job in demo.jobs():  # its pod, although it has ended, would keep the claim
        api.delete("Job", demo.namespace, job["metadata"]["name"], propagationPolicy="Background")
    api.delete("PersistentVolumeClaim", demo.namespace, "weights")
    demo.eventually(lambda: api.find("PersistentVolumeClaim", demo.namespace, "weights") is None, 60)
    demo.tell(progress=DOWNLOADING)
    demo.patch(replicas=1)
    demo.becomes("ModelCached", "False", "Downloading")
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 60, "it comes again")
    assert api.get("PersistentVolumeClaim", demo.namespace, "weights")["metadata"]["uid"] != before
    assert not demo.pods()
    demo.tell(**RESULT)
    demo.settle(1)


# ---- what is rendered ----

Make = Callable[..., InferenceService]


@pytest.fixture
def service(service: Make) -> Make:
    def make(model: dict[str, Any] | None = None, **spec: Any) -> InferenceService:
        return service(model={**MODEL, **(model or {})}, **spec)

    return make


def test_the_jobs_pod_is_restricted_and_credentials_are_only_mounted(
    service: Make, api: Any, namespace: str
) -> None:
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    one = service(podTemplate={"tolerations": tolerations}, accelerator={"nodeSelector": {"gpu": "h200"}})
    job = fetch_job(one, CONFIG)
    assert api.create({**job, "metadata": {**job["metadata"], "namespace": namespace}}, dryRun="All")
    template = job["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": namespace}, **template}
    pod["metadata"] = {**template["metadata"], "name": "x", "namespace": namespace}
    api.create(pod, dryRun="All")
    spec, [container] = template["spec"], template["spec"]["containers"]
    assert spec["nodeSelector"] == {"gpu": "h200"} and spec["tolerations"] == tolerations
    assert spec["automountServiceAccountToken"] is False and container["resources"]["limits"]["memory"]
    assert [entry["name"] for entry in container["env"]] == ["POD_IP"]
    [volume] = [v for v in spec["volumes"] if v["name"] == "mizzen-credentials"]
    assert volume["secret"]["items"] == [{"key": "token", "path": "credentials"}]
    at = container["args"].index("--credentials")
    assert container["args"][at + 1] == "/var/run/mizzen/credentials/credentials"


def test_the_command_takes_the_arguments(service: Make) -> None:
    from typer.testing import CliRunner

    from mizzen.cli import app

    one = service({"endpoint": "http://127.0.0.1:1"})
    given = {"model": {"folder": cache_folder(one), "resolvedRevision": COMMIT}}
    [container] = fetch_job(replace(one, status=given), CONFIG)["spec"]["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--pin") + 1] == COMMIT
    ran = CliRunner().invoke(app, [*container["args"], "--help"])
    assert ran.exit_code == 0, ran.output
    known = set(ran.output.split())
    assert {argument for argument in container["args"] if argument.startswith("--")} <= known


def test_a_jobs_name_follows_what_it_does_and_not_what_was_resolved(service: Make) -> None:
    one = service()
    name = fetch_job(one, CONFIG)["metadata"]["name"]
    pinned = replace(one, status={"model": {"folder": cache_folder(one), "resolvedRevision": COMMIT}})
    assert fetch_job(pinned, CONFIG)["metadata"]["name"] == name and len(name) <= 63
    others = [
        service({"source": "hf://Qwen/Qwen3-1.7B"}),
        service({"endpoint": "http://hub"}),
        service({"cache": {**MODEL["cache"], "claimName": "other"}}),
    ]
    assert len({name, *(fetch_job(other, CONFIG)["metadata"]["name"] for other in others)}) == 4
    assert len({revision(other, CONFIG) for other in (one, *others)}) == 4


def test_a_cache_on_the_node_is_filled_by_each_node(service: Make, api: Any, lax_namespace: str) -> None:
    one = service({"cache": {"mode": "HostPath", "path": "/srv/models"}})
    one = replace(one, status={"model": {"folder": cache_folder(one), "resolvedRevision": COMMIT}})
    [pod] = engine_pods(one, CONFIG, revision="abcd1234", group=0, attempt=0)
    pod["metadata"]["namespace"] = lax_namespace
    api.create(pod, dryRun="All")
    [first], [engine] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert first["args"][:2] == ["fetch", MODEL["source"]] and COMMIT in first["args"]
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in engine["volumeMounts"]}
    assert mounts["mizzen-model"] is True and "mizzen-credentials" not in mounts
    assert {"mizzen-model", "mizzen-credentials"} <= {mount["name"] for mount in first["volumeMounts"]}


def test_a_claim_goes_with_its_service_only_when_asked(service: Make) -> None:
    kept = cache_claim(service())
    assert kept is not None and "ownerReferences" not in kept["metadata"]
    going = cache_claim(
        service({"cache": {**MODEL["cache"], "whenDeleted": "Delete", "accessMode": "ReadWriteOnce"}})
    )
    assert going is not None and going["metadata"]["ownerReferences"][0]["name"] == "demo"
    assert going["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert cache_claim(service({"cache": {"mode": "PersistentVolumeClaim", "claimName": "w"}})) is None


def test_only_a_finished_download_of_this_very_place_is_remembered(service: Make) -> None:
    one = service()
    known = {"place": cache_location(one), "folder": cache_folder(one), "resolvedRevision": COMMIT, "totalBytes": 7}
    assert load_finished_download(replace(one, status={"model": known})) is None
    known["cachedTime"] = "2026-01-01T00:00:00Z"
    found = load_finished_download(replace(one, status={"model": known}))
    assert found is not None and found.revision == COMMIT and found.percent == 100
    assert load_finished_download(replace(service({"source": "hf://a/b"}), status={"model": known})) is None


# ---- pure ----

BEGUN = Download("p", "hf://a/b", "b-1")
SOURCES = st.from_regex(r"(hf|s3|oci)://[A-Za-z0-9._~@+=/-]{1,80}", fullmatch=True)


@given(SOURCES, SOURCES)
def test_folders_are_names_and_tell_sources_apart(one: str, two: str) -> None:
    def of(source: str) -> str:
        model, access = type("M", (), {"source": source}), type("A", (), {"endpoint": ""})
        return cache_folder(type("S", (), {"model": model, "access": access}))  # type: ignore[arg-type]

    assert (of(one) == of(two)) == (one == two)
    assert set(of(one)) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert 1 <= len(of(one)) <= 63 and of(one)[0] not in ".-"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: st.dictionaries(st.sampled_from([*DOWNLOADING, "message"]), inner, max_size=5),
        max_leaves=9,
    )
)
def test_whatever_a_pod_says_makes_a_status(said: Any) -> None:
    said = said if isinstance(said, dict) else {}
    found = read_progress({"metadata": {"name": "p"}, "status": {}}, said, BEGUN)
    status = found.as_status()
    assert json.dumps(status) and found.describe() and not found.cached_time
    numbers = ("totalBytes", "fetchedBytes", "bytesPerSecond", "secondsLeft", "downloadPercent")
    assert all(status[name] >= 0 for name in numbers if name in status)


def test_nothing_is_made_of_a_model_that_is_not_there() -> None:
    actions = [CreateGroup("n", 0, "new", 0, "Missing"), CreateGroup("o", 0, "old", 0, "Restored")]
    actions.append(DeleteGroup("x", "u", "Ended", ()))  # type: ignore[arg-type]
    wanted = RolloutTarget("demo", 2, "new")
    cached = replace(BEGUN, cached_time="2026-01-01T00:00:00Z")
    assert allowed_actions(actions, "new", BEGUN) == actions[1:] and pause_during_download(wanted, BEGUN).paused
    for download in (None, cached):
        assert allowed_actions(actions, "new", download) == actions and pause_during_download(wanted, download) == wanted


@pytest.mark.parametrize(
    ("change", "seconds", "told"),
    [
        ({}, 1000.0, False),
        ({"fetched_bytes": 449}, 29.0, False),
        ({"fetched_bytes": 449}, 30.0, True),
        ({"fetched_bytes": 450}, 1.0, True),
        ({"bytes_per_second": 7, "seconds_left": 9}, 29.0, False),
        ({"bytes_per_second": 7, "seconds_left": 9}, 30.0, True),
        ({"waiting_for": "the hub asks for a pause"}, 1.0, True),
        ({"error": "no room is left"}, 1.0, True),
        ({"total_bytes": 1001}, 1.0, True),
    ],
)
def test_a_download_is_told_when_it_has_news(change: dict[str, Any], seconds: float, told: bool) -> None:
    said = replace(BEGUN, total_bytes=1000, fetched_bytes=400, bytes_per_second=5, seconds_left=120)
    assert should_report(said, replace(said, **change), seconds) is told


def test_a_rollouts_clock_begins_when_the_model_is_there() -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    memory = RolloutState(progress=RolloutProgress("new", 2, 0, 2, time))
    later = time + timedelta(hours=3)
    cached = replace(BEGUN, cached_time=later.isoformat())
    moved = restart_progress_clock(memory, cached).progress
    assert moved is not None and moved.time == later
    assert restart_progress_clock(memory, BEGUN) == memory and restart_progress_clock(memory, None) == memory
    assert restart_progress_clock(memory, replace(cached, cached_time=(time - timedelta(hours=1)).isoformat())) == memory

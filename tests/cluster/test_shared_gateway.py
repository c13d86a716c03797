# SPDX-License-Identifier: Apache-2.0
"""Two services behind one shared gateway: real processes, API keys from a Secret, TLS, and CURVE."""

from __future__ import annotations

import datetime
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
SPACE = "harbour"
QUESTION: list[Any] = [{"role": "user", "content": "What is Mizzen?"}]

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def eventually(check: Callable[[], Any], seconds: float = 150) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
    return value


def keys_secret(*keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "teams", "namespace": SPACE},
        "stringData": {"keys.yaml": yaml.safe_dump({"keys": list(keys)})},
    }


def service(name: str, **model: Any) -> dict[str, Any]:
    body = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    body["metadata"] = {"name": name, "namespace": SPACE}
    body["spec"]["model"] |= model
    body["spec"]["gateway"] |= {"mode": "Shared", "apiKeys": {"secretNames": ["teams"]}}
    return body


class Harbour:
    """The namespace of both services, with requests to them and queries about them."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def status(self, name: str) -> dict[str, Any]:
        status = self.cluster.get("infsvc", name, "-n", SPACE).get("status", {})
        conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
        return {**status, "conditions": conditions}

    def ready(self, *names: str) -> bool:
        return all(self.status(name)["conditions"].get("Ready", ("",))[0] == "True" for name in names)

    def client(self, key: str) -> openai.OpenAI:
        url = self.cluster.url("first", SPACE)
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def ask(self, model: str, key: str = "sk-team-a") -> str:
        answer = self.client(key).chat.completions.create(model=model, messages=QUESTION, temperature=0)
        return answer.choices[0].message.content or ""

    def code(self, model: str, key: str = "sk-team-a") -> int:
        try:
            self.ask(model, key)
        except openai.APIStatusError as error:
            return error.status_code
        except openai.APIConnectionError:
            return 0
        return 200


@pytest.fixture(scope="module")
def harbour(cluster: Any) -> Iterator[Harbour]:
    cluster.make_namespace(SPACE)
    cluster.apply(
        keys_secret(
            {"name": "a", "key": "sk-team-a"}, {"name": "b", "key": "sk-team-b", "models": ["second"]}
        )
    )
    cluster.apply(service("first", aliases=["chat"]), service("second"))
    harbour = Harbour(cluster)
    eventually(lambda: harbour.ready("first", "second"))
    yield harbour
    cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def test_both_models_answer_at_one_url(harbour: Harbour) -> None:
    assert harbour.status("first")["url"] == harbour.status("second")["url"]
    answer = harbour.ask("first")
    assert answer == harbour.ask("chat") == harbour.ask("second") != ""
    assert {model.id for model in harbour.client("sk-team-a").models.list()} == {"first", "chat", "second"}
    assert harbour.code("third") == 404
    pods = harbour.cluster.get("pods", "-n", SPACE, "-l", "mizzen.dev/component=gateway")["items"]
    assert len(pods) == 1


def test_api_keys_and_their_changes_apply_to_both_services(harbour: Harbour) -> None:
    assert [harbour.code("second", key) for key in ("sk-team-b", "sk-other")] == [200, 401]
    assert harbour.code("first", "sk-team-b") == 403
    harbour.cluster.apply(keys_secret({"name": "a", "key": "sk-team-a"}, {"name": "c", "key": "sk-team-c"}))
    eventually(lambda: harbour.code("first", "sk-team-c") == 200)  # the gateway does not restart
    assert harbour.code("second", "sk-team-b") == 401


def test_only_the_models_of_a_suspended_service_answer_503(harbour: Harbour) -> None:
    patch = json.dumps({"spec": {"suspend": True}})
    harbour.cluster.kubectl("patch", "infsvc", "second", "-n", SPACE, "--type=merge", "-p", patch)
    eventually(lambda: harbour.code("second") == 503)
    assert harbour.code("first") == 200
    patch = json.dumps({"spec": {"suspend": False}})
    harbour.cluster.kubectl("patch", "infsvc", "second", "-n", SPACE, "--type=merge", "-p", patch)
    eventually(lambda: harbour.ready("second") and harbour.code("second") == 200)


def test_a_name_conflict_is_in_the_status_of_the_later_service(harbour: Harbour) -> None:
    harbour.cluster.apply(service("second", aliases=["chat"]))
    eventually(lambda: harbour.status("second")["conditions"]["Conflict"] == ("True", "NameConflict"))
    assert harbour.code("chat") == harbour.code("second") == 200
    harbour.cluster.apply(service("second"))
    eventually(lambda: harbour.ready("second"))


def certificate(name: str) -> dict[str, Any]:
    """Return a Secret with a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), number, now - day, now + day)
    signed = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": "cert", "namespace": SPACE},
        "stringData": {"tls.crt": signed.public_bytes(Encoding.PEM).decode(), "tls.key": private.decode()},
    }


def served_certificate(url: str) -> str:
    """Return the common name of a server's current certificate; empty if no TLS server answers."""
    address = urlsplit(url)
    try:
        pem = ssl.get_server_certificate((address.hostname or "", address.port or 443), timeout=10)
    except OSError:
        return ""
    subject = x509.load_pem_x509_certificate(pem.encode()).subject
    [name] = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def test_the_certificate_comes_from_a_secret_and_follows_its_changes(harbour: Harbour) -> None:
    harbour.cluster.apply(certificate("one"))
    patch = json.dumps({"spec": {"gateway": {"tls": {"secretName": "cert"}}}})
    harbour.cluster.kubectl("patch", "infsvc", "first", "-n", SPACE, "--type=merge", "-p", patch)
    eventually(lambda: harbour.status("second")["url"].startswith("https://"))
    url = harbour.cluster.url("second", SPACE)
    assert url.startswith("https://")
    eventually(lambda: served_certificate(url) == "one")
    # Pods with plain HTTP stay behind the Service until all pods with a certificate are ready.
    harbour.cluster.kubectl("rollout", "status", "deployment/mizzen-shared", "-n", SPACE, "--timeout=120s")
    with httpx.Client(verify=False, timeout=60) as http:
        client = openai.OpenAI(base_url=url, api_key="sk-team-a", max_retries=0, http_client=http)
        answer = client.chat.completions.create(model="second", messages=QUESTION, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    harbour.cluster.apply(certificate("two"))
    eventually(lambda: served_certificate(url) == "two")  # the gateway does not restart


def served_models(http: httpx.Client, url: str) -> set[str]:
    """Return the model names that a gateway lists; empty while it cannot be reached."""
    try:
        listed = http.get(f"{url}/models", headers={"authorization": "Bearer sk-team-a"})
    except httpx.HTTPError:
        return set()
    return {model["id"] for model in listed.json().get("data", ())}


def test_the_gateway_is_deleted_with_the_last_service(harbour: Harbour) -> None:
    harbour.cluster.kubectl("delete", "infsvc", "first", "-n", SPACE, "--wait=true", "--timeout=60s")
    with httpx.Client(verify=False, timeout=60) as http:  # the settings of the remaining service apply now
        eventually(lambda: harbour.status("second")["url"].startswith("http://"))
        eventually(lambda: served_models(http, harbour.cluster.url("second", SPACE)) == {"second"})
    harbour.cluster.kubectl("delete", "infsvc", "second", "-n", SPACE, "--wait=true", "--timeout=60s")
    kinds = "pods,deployments,replicasets,services,rolebindings,configmaps,secrets,serviceaccounts"
    selector = "mizzen.dev/component"
    eventually(lambda: not harbour.cluster.get(kinds, "-n", SPACE, "-l", selector)["items"])

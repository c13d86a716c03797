# SPDX-License-Identifier: Apache-2.0
"""Effects of the chart's values on the rendered manifests, without a cluster."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

import mizzen
from chart_manifests import CHART, ROOT, Manifests, of, operator
from mizzen_operator.api.accelerator_profiles import parse_profiles
from mizzen_operator.config import parse_config

MONITORING = "monitoring.coreos.com/v1"


DIGEST = "sha256:" + "0123456789abcdef" * 4


def kinds(manifests: Manifests) -> list[str]:
    """Return the sorted kinds of all manifests except hooks."""
    return sorted(m["kind"] for m in manifests if "helm.sh/hook" not in m["metadata"].get("annotations", {}))


def option(container: dict[str, Any], name: str) -> str:
    return container["args"][container["args"].index(name) + 1]


TOLERATION = {"key": "pool", "operator": "Equal", "value": "inference", "effect": "NoExecute"}
PROFILES: dict[str, Any] = {
    "h100-mig": {
        "resourceName": "nvidia.com/mig-3g.40gb",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{**TOLERATION, "tolerationSeconds": 3600}],
        "memory": "39Gi",
        "runtimeClassName": "nvidia",
    },
    "plain": {},
}


USUAL = [
    "ClusterRole",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Service",
    "ServiceAccount",
]


def test_the_chart_passes_helms_linter(offline: Any) -> None:
    offline("lint", "--strict", CHART)
    offline("lint", "--strict", CHART, "--set-json", f"acceleratorProfiles={json.dumps(PROFILES)}")


def test_the_defaults_are_an_operator_with_two_replicas_and_the_crd(offline: Any) -> None:
    manifests = offline.template()
    assert kinds(manifests) == USUAL
    assert of(manifests, "Deployment")["spec"]["replicas"] == 2
    crd = of(manifests, "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert crd["spec"] == yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())["spec"]
    for manifest in manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "sail"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


def test_every_pod_is_of_the_restricted_level(offline: Any) -> None:
    manifests = offline.template()
    pods = [of(manifests, "Deployment")["spec"]["template"]["spec"], of(manifests, "Pod")["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_right_to_list_secrets_can_be_withheld(offline: Any) -> None:
    def secrets(**rbac: Any) -> list[list[str]]:
        [role] = [
            manifest
            for manifest in offline.template({"rbac": rbac})
            if manifest["kind"] in {"ClusterRole", "Role"} and manifest["metadata"]["name"] == "sail-operator"
        ]
        assert len(role["rules"]) > 10
        return [rule["verbs"] for rule in role["rules"] if "secrets" in rule["resources"]]

    assert ["list"] in secrets()
    for scope in ("cluster", "namespace"):
        assert secrets(scope=scope, listSecrets=False) == [["get", "create", "patch"]]


@pytest.mark.parametrize("crds", [True, False])
def test_with_namespace_scope_only_the_crd_is_cluster_scoped(offline: Any, crds: bool) -> None:
    values = {"rbac": {"scope": "namespace"}, "crds": {"enabled": crds}, "monitoring": {"enabled": True}}
    manifests = offline.template(values)
    unscoped = [m["kind"] for m in manifests if "namespace" not in m["metadata"]]
    assert unscoped == (["CustomResourceDefinition"] if crds else [])
    assert not [m for m in manifests if m["kind"].startswith("Cluster")]
    assert {m["metadata"]["namespace"] for m in manifests if "namespace" in m["metadata"]} == {"harbour"}
    _, container = operator(manifests)
    assert option(container, "--namespace") == "harbour"
    assert option(container, "--gateway-role-kind") == "Role"
    for rules in (m["rules"] for m in manifests if m["kind"] == "Role"):
        assert not [rule for rule in rules if "clusterroles" in rule["resources"]]
    bind = [rule for rule in of(manifests, "Role", "sail-operator")["rules"] if "bind" in rule["verbs"]]
    assert [(rule["resources"], rule["resourceNames"]) for rule in bind] == [(["roles"], ["sail-gateway"])]


def test_the_operator_may_watch_another_namespace_than_its_own(offline: Any) -> None:
    manifests = offline.template({"rbac": {"scope": "namespace"}, "operator": {"watchNamespace": "llm"}})
    namespaces = {(m["kind"], m["metadata"]["name"]): m["metadata"].get("namespace") for m in manifests}
    assert namespaces["Role", "sail-operator"] == namespaces["RoleBinding", "sail-operator"] == "llm"
    assert namespaces["Role", "sail-gateway"] == "llm"
    assert namespaces["Role", "sail-operator-lease"] == namespaces["Deployment", "sail-operator"] == "harbour"
    [subject] = of(manifests, "RoleBinding", "sail-operator")["subjects"]
    assert subject["namespace"] == "harbour"


def test_the_operator_gets_the_accelerator_profiles(offline: Any) -> None:
    _, container = operator(offline.template({"acceleratorProfiles": PROFILES}))
    profiles = parse_config(container["args"], {}).profiles()
    assert profiles == parse_profiles(json.dumps(PROFILES))
    assert profiles["h100-mig"].tolerations[0].toleration_seconds == 3600
    assert parse_config(operator(offline.template())[1]["args"], {}).profiles() == {}


def test_monitors_are_rendered_if_their_api_exists_or_monitoring_is_enabled(offline: Any) -> None:
    here = ("--api-versions", MONITORING)
    monitoring = {"ServiceMonitor", "PodMonitor"}
    assert not monitoring & set(kinds(offline.template()))
    assert monitoring <= set(kinds(offline.template(None, *here)))
    assert monitoring <= set(kinds(offline.template({"monitoring": {"enabled": True}})))
    assert not monitoring & set(kinds(offline.template({"monitoring": {"enabled": False}}, *here)))


def test_each_dashboard_is_a_config_map_for_grafanas_sidecar(offline: Any) -> None:
    manifests = offline.template({"monitoring": {"enabled": True, "dashboards": {"namespace": "grafana"}}})
    made = {
        name: (m, json.loads(text))
        for m in manifests
        if m["kind"] == "ConfigMap"
        for name, text in m["data"].items()
    }
    assert set(made) == {path.name for path in (CHART / "dashboards").glob("*.json")}
    for name, (manifest, dashboard) in made.items():
        assert dashboard == json.loads((CHART / "dashboards" / name).read_text())
        assert manifest["metadata"]["namespace"] == "grafana"
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_each_alert_names_its_runbook(offline: Any) -> None:
    groups = [
        group
        for path in sorted((CHART / "alerts").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    left_out = alerts[0]["alert"]
    rules = {"runbookBaseUrl": "https://runbooks.example/mizzen", "disabled": [left_out]}
    made = of(offline.template({"monitoring": {"enabled": True, "rules": rules}}), "PrometheusRule")
    got = [rule for group in made["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert [rule["alert"] for rule in got] == [a["alert"] for a in alerts if a["alert"] != left_out]
    for rule in got:
        where, _, runbook = rule["annotations"]["runbook_url"].rpartition("/")
        assert where == "https://runbooks.example/mizzen"
        assert (ROOT / f"docs/runbooks/{runbook}.md").is_file()


def test_objectives_floors_and_thresholds_of_alerts_are_values(offline: Any) -> None:
    def expressions(**rules: Any) -> str:
        made = of(offline.template({"monitoring": {"enabled": True, "rules": rules}}), "PrometheusRule")
        return "\n".join(rule["expr"] for group in made["spec"]["groups"] for rule in group["rules"])

    text = expressions()
    assert "${" not in text
    assert "14.4 * (1 - 99.9 / 100)" in text and 'le=~"2([.]0)?"' in text
    changed = expressions(
        objectives={"successPercent": 99.5, "firstTokenSeconds": 0.5},
        floors={"failedRequests": 1000000},
        thresholds={"coldStartSeconds": 3600},
    )
    assert "14.4 * (1 - 99.5 / 100)" in changed and 'le=~"0.5([.]0)?"' in changed
    assert "mizzen_operator_oldest_start_seconds > 3600" in changed
    assert re.search(r"rate1h \* 3600 > 1e\+06|rate1h \* 3600 > 1000000", changed)
    with pytest.raises(Exception, match="firstTokenSeconds"):
        expressions(objectives={"firstTokenSeconds": 3})


def test_image_references_consist_of_registry_repository_tag_and_digest(offline: Any) -> None:
    images = {
        "registry": "registry.example.com/mirror",
        "operator": {"digest": DIGEST},
        "engine": {"repository": "team/engine", "tag": "9"},
        "pullSecrets": [{"name": "regcred"}],
        "childPullPolicy": "Always",
    }
    manifests = offline.template({"images": images})
    template, container = operator(manifests)
    assert container["image"] == f"registry.example.com/mirror/mizzen/operator@{DIGEST}"
    assert option(container, "--engine-image") == "registry.example.com/mirror/team/engine:9"
    assert (
        option(container, "--gateway-image")
        == f"registry.example.com/mirror/mizzen/gateway:{mizzen.__version__}"
    )
    assert option(container, "--image-pull-policy") == "Always"
    test = of(manifests, "Pod")["spec"]
    assert test["containers"][0]["image"] == container["image"]
    assert template["spec"]["imagePullSecrets"] == test["imagePullSecrets"] == [{"name": "regcred"}]


def test_a_chart_without_a_registry_is_not_rendered(offline: Any) -> None:
    """Without a registry, a node would pull from a namespace of Docker Hub that is not Mizzen's."""
    unset: dict[str, Any] = {"registry": ""}
    message = (
        r"set images\.registry to the registry and organisation that have the image mizzen/operator, .*--set"
    )
    with pytest.raises(Exception, match=message):
        offline.template({"images": unset})
    unset |= {name: {"digest": DIGEST} for name in ("operator", "gateway")}
    unset["engine"] = {"repository": "localhost/mizzen/engine"}
    with pytest.raises(Exception, match=r"the image mizzen/operator"):
        offline.template({"images": unset})


def test_a_repository_that_begins_with_a_registry_is_used_as_it_is(offline: Any) -> None:
    repositories = ("localhost/mizzen/operator", "other.example.com/gateway", "cache:5000/a/engine")
    images = {name.rpartition("/")[2]: {"repository": name, "tag": "2"} for name in repositories}
    for registry in ("", "registry.example.com/mirror"):
        _, container = operator(offline.template({"images": {"registry": registry, **images}}))
        assert container["image"] == "localhost/mizzen/operator:2"
        assert option(container, "--gateway-image") == "other.example.com/gateway:2"
        assert option(container, "--engine-image") == "cache:5000/a/engine:2"


def test_common_pod_values_reach_the_operators_pod(offline: Any) -> None:
    spread = [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    values: dict[str, Any] = {
        "commonLabels": {"team": "llm", "app.kubernetes.io/instance": "not-this"},
        "commonAnnotations": {"owner": "me"},
        "operator": {
            "extraArgs": ["--resync-seconds", "60"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraEnvFrom": [{"secretRef": {"name": "s"}}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "extraContainers": [{"name": "beside", "image": "x"}],
            "extraInitContainers": [{"name": "before", "image": "x"}],
            "podLabels": {"pod": "label"},
            "podAnnotations": {"pod": "annotation"},
            "podSecurityContext": {"runAsUser": None, "fsGroup": 1000680000},
            "priorityClassName": "system-cluster-critical",
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": spread,
            "terminationGracePeriodSeconds": 33,
            "api": {"requestsPerSecond": 400, "burst": 100000},
            "leaderElection": {"leaseSeconds": 30, "renewSeconds": 20, "retrySeconds": 5},
            "logLevel": "debug",
        },
        "serviceAccount": {"annotations": {"iam": "role"}},
    }
    manifests = offline.template(values)
    template, container = operator(manifests)
    pod = template["spec"]
    assert template["metadata"]["labels"] | {"team": "llm", "pod": "label"} == template["metadata"]["labels"]
    assert template["metadata"]["annotations"] == {"pod": "annotation", "owner": "me"}
    selector = of(manifests, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector["app.kubernetes.io/instance"] == "sail"
    assert selector.items() <= template["metadata"]["labels"].items()
    assert container["args"][-2:] == ["--resync-seconds", "60"]
    assert container["env"][-1] == {"name": "A", "value": "b"}
    assert container["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert pod["volumes"][-1] == {"name": "v", "emptyDir": {}}
    assert container["volumeMounts"][-1] == {"name": "v", "mountPath": "/v"}
    assert [c["name"] for c in pod["containers"]] == ["operator", "beside"]
    assert [c["name"] for c in pod["initContainers"]] == ["before"]
    assert pod["securityContext"]["fsGroup"] == 1000680000
    assert "runAsUser" not in pod["securityContext"]
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert pod["nodeSelector"] == {"a": "b"}
    assert pod["tolerations"] == values["operator"]["tolerations"]
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["topologySpreadConstraints"] == spread
    assert pod["terminationGracePeriodSeconds"] == 33
    options = {"--requests-per-second": "400", "--request-burst": "100000", "--log-level": "debug"}
    options |= {"--lease-seconds": "30", "--renew-seconds": "20", "--retry-seconds": "5"}
    assert {name: option(container, name) for name in options} == options
    assert of(manifests, "ServiceAccount", "sail-operator")["metadata"]["annotations"]["iam"] == "role"
    assert all(m["metadata"]["labels"]["team"] == "llm" for m in manifests)
    assert all(m["metadata"]["annotations"]["owner"] == "me" for m in manifests)


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"crds": {"enabled": False}}, ["CustomResourceDefinition"]),
        ({"serviceAccount": {"create": False, "name": "mine"}}, ["ServiceAccount"]),
        ({"networkPolicy": {"enabled": False}}, ["NetworkPolicy"]),
        ({"podDisruptionBudget": {"enabled": False}}, ["PodDisruptionBudget"]),
        (
            {"rbac": {"create": False}},
            ["ClusterRole", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"],
        ),
    ],
)
def test_a_disabled_feature_renders_no_objects(
    offline: Any, values: dict[str, Any], missing: list[str]
) -> None:
    manifests = offline.template(values)
    assert sorted([*kinds(manifests), *missing]) == USUAL
    if "serviceAccount" in values:
        template, _ = operator(manifests)
        assert template["spec"]["serviceAccountName"] == "mine"


EXTRA = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "extra", "labels": {}},
    "data": {"release": "{{ .Release.Name }}"},
}


def test_name_overrides_apply_to_all_objects(offline: Any) -> None:
    named = offline.template({"nameOverride": "llm"})
    assert of(named, "Deployment")["metadata"]["name"] == "sail-llm-operator"
    full = offline.template({"fullnameOverride": "fleet", "extraObjects": [EXTRA]})
    assert of(full, "Service")["metadata"]["name"] == "fleet-operator"
    _, container = operator(full)
    assert option(container, "--lease-name") == "fleet-operator"
    assert option(container, "--gateway-role") == "fleet-gateway"
    assert of(full, "ConfigMap")["data"] == {"release": "sail"}
    for manifest in full:
        assert "sail" not in manifest["metadata"]["name"]


def test_the_network_policy_admits_the_configured_peers_and_the_operators_own_connections(
    offline: Any,
) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    policy = of(offline.template({"networkPolicy": {"from": [peer]}}), "NetworkPolicy")["spec"]
    [rule] = policy["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    test_pod, named = rule["from"]
    assert named == peer
    assert test_pod["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    egress = {
        rule["to"][0]["podSelector"]["matchLabels"]["mizzen.dev/component"]: rule
        for rule in policy["egress"][2:]
    }
    assert all(rule["to"][0]["namespaceSelector"] == {} and len(rule["to"]) == 1 for rule in egress.values())
    assert {name: rule["ports"] for name, rule in egress.items()} == {
        "fetch": [{"port": 8082, "protocol": "TCP"}],
        "gateway": [{"port": 8001, "protocol": "TCP"}, {"port": 8001, "protocol": "UDP"}],
    }

# SPDX-License-Identifier: Apache-2.0
"""The removal of the installation, after the tests of all other files."""

from __future__ import annotations

from product import RELEASE, SITE_CLAIM, SYSTEM, TENANT, Product, everything

from cluster import Timeline, kubectl, run, wait_until

CRD = "customresourcedefinition.apiextensions.k8s.io/inferenceservices.mizzen.dev"
ROLE = "clusterrole.rbac.authorization.k8s.io/mizzen-gateway"


def test_helm_uninstall_leaves_only_the_crd_and_the_gateway_role(
    product: Product, timeline: Timeline, before: set[str]
) -> None:
    with timeline.measure("helm uninstall"):
        run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout", "2m")
    wait_until(lambda: not product.operators(), "no operator left")
    kinds = "all,leases,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pdb"
    left = kubectl("get", kinds, "-n", SYSTEM, "-o", "name").split()
    assert sorted(left) == ["configmap/kube-root-ca.crt", "serviceaccount/default"]
    kubectl("delete", "namespace", SYSTEM, TENANT, "--timeout=120s")
    kubectl("delete", "pv", SITE_CLAIM, "--ignore-not-found", "--timeout=60s")
    kept = {CRD, ROLE} - before
    assert everything() - before == kept
    if kept:
        kubectl("delete", *sorted(kept))
    assert everything() <= before

"""The end of the installation that the other files have walked through."""

from __future__ import annotations

from product import RELEASE, SITE_CLAIM, SYSTEM, TENANT, Product, everything

from cluster import Timeline, kubectl, run, wait_until


def test_helm_uninstall_leaves_the_crd_and_nothing_else(
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
    kept = "customresourcedefinition.apiextensions.k8s.io/inferenceservices.mizzen.dev"
    assert everything() - before == {kept} - before
    if kept not in before:
        kubectl("delete", kept)

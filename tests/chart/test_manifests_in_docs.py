# SPDX-License-Identifier: Apache-2.0
"""The API server or the chart accepts every YAML block and every manifest of the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mizzen_local.kubectl import Kubectl
from mizzen_operator.api import labels
from snippets import all_snippets, here_documents

ROOT = Path(__file__).parents[2]
CHART_VALUES = set(yaml.safe_load((ROOT / "charts/mizzen/values.yaml").read_text()))
CATALOG_VALUES = set(yaml.safe_load((ROOT / "charts/mizzen-models/values.yaml").read_text()))
OTHERS = {"rules": "configuration of prometheus-adapter"}
"""Keys of blocks that are neither manifests nor values of the chart, and what such blocks are."""
cluster = [pytest.mark.cluster, pytest.mark.xdist_group("chart")]


@dataclass(frozen=True)
class Block:
    """YAML in the documentation: its place, and its documents."""

    place: str
    documents: tuple[dict[str, Any], ...]

    @property
    def keys(self) -> set[str]:
        """Top-level keys of all documents."""
        return {key for document in self.documents for key in document}

    def is_manifest(self) -> bool:
        """Return whether the block has whole objects."""
        return all("kind" in document for document in self.documents)

    def is_part_of_a_service(self) -> bool:
        """Return whether the block has fields of an InferenceService, with or without `spec` around them."""
        return self.keys <= {"spec", "rollout"}


def blocks() -> Iterator[Block]:
    """Yield the YAML blocks of the documentation and the manifests in its commands."""
    for snippet in all_snippets():
        texts = [snippet.text] if snippet.language == "yaml" else []
        if snippet.language in {"console", "sh"}:
            texts = [text for text in here_documents(snippet.text) if text.lstrip().startswith("apiVersion")]
        for text in texts:
            documents = tuple(document for document in yaml.safe_load_all(text) if document)
            yield Block(f"{snippet.page}:{snippet.line}", documents)


def selected(accept: Callable[[Block], bool], marks: Any = ()) -> list[Any]:
    return [pytest.param(block, id=block.place, marks=marks) for block in blocks() if accept(block)]


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Return an InferenceService with the fields of a block that has only some of them."""
    spec = document.get("spec", document)
    return {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "part"},
        "spec": {**spec, "model": {"source": "pvc://weights/part", **spec.get("model", {})}},
    }


@pytest.fixture
def make_namespaces(kubectl: Kubectl) -> Callable[[Block], None]:
    """Return a function that creates the namespaces of a block's objects if they do not exist."""

    def make(block: Block) -> None:
        for document in block.documents:
            if name := document.get("metadata", {}).get("namespace"):
                manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    return make


@pytest.mark.usefixtures("crd", "stand_ins")
@pytest.mark.parametrize("block", selected(Block.is_manifest, cluster))
def test_the_api_server_accepts_the_manifests(
    block: Block, make_namespaces: Callable[[Block], None], dry_run: Callable[..., list[str]]
) -> None:
    make_namespaces(block)
    accepted = dry_run("\n---\n".join(json.dumps(document) for document in block.documents))
    assert len(accepted) == len(block.documents)


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("block", selected(Block.is_part_of_a_service, cluster))
def test_the_api_server_accepts_the_fields_of_a_service(
    block: Block, dry_run: Callable[..., list[str]]
) -> None:
    for document in block.documents:
        assert len(dry_run(json.dumps(completed(document)))) == 1


@pytest.mark.parametrize("block", selected(lambda block: block.keys <= CHART_VALUES))
def test_the_chart_accepts_the_values(block: Block, offline: Any) -> None:
    for document in block.documents:
        text = json.dumps(document).replace("sha256:\\u2026", f"sha256:{'0' * 64}")
        values = json.loads(text)
        values["images"] = {"registry": "registry.example.com/team", **values.get("images", {})}
        assert offline.template(values, "--api-versions", "monitoring.coreos.com/v1")


@pytest.mark.parametrize("block", selected(lambda block: block.keys <= CATALOG_VALUES))
def test_the_catalog_accepts_the_values(block: Block, catalog: Any) -> None:
    for document in block.documents:
        enabled = {name for name, entry in document.get("catalog", {}).items() if entry.get("enabled")}
        rendered = catalog.template(document, "--set", "catalog.phi-4-h100.enabled=true")
        assert {service["metadata"]["name"] for service in rendered} == enabled | {"phi-4-h100"}


def test_every_block_is_checked() -> None:
    known = [
        block
        for block in blocks()
        if block.is_manifest()
        or block.is_part_of_a_service()
        or block.keys <= CHART_VALUES | set(OTHERS)
        or block.keys <= CATALOG_VALUES
    ]
    assert [block.place for block in blocks()] == [block.place for block in known]
    assert len(known) > 30


def test_the_documented_service_selects_the_gateways_pods() -> None:
    """docs/outside.md shows a Service with the selector of the Service that the operator creates."""
    selectors = [
        document["spec"]["selector"]
        for block in blocks()
        for document in block.documents
        if document.get("kind") == "Service"
    ]
    assert selectors == [{labels.SERVICE: "chat", labels.COMPONENT: labels.GATEWAY}]

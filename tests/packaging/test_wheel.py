# SPDX-License-Identifier: Apache-2.0
"""The wheel works alone, and the source distribution builds the same wheel."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from built_distribution import ROOT, SHARED, Built, Installed
from readme_renderer import markdown

pytestmark = pytest.mark.xdist_group("packaging")
LOCAL_FILES = """
from mizzen.common.packaged_files import find_packaged
from mizzen_local import build, demo
from mizzen_local.node.images import image_files
from mizzen_operator.chart import operator_manifests
values = {"images": {"registry": "registry.example.com"}}
print(len(operator_manifests(find_packaged("charts/mizzen"), values, "system")) > 5)
print((image_files()["/opt/mizzen/models"] / "demo/model.safetensors").stat().st_size > 10**6)
print("kind: InferenceService" in find_packaged(demo.EXAMPLE).read_text())
print("inferenceservices.mizzen.dev" in find_packaged("crds/inferenceservices.yaml").read_text())
print((build.SOURCES / "kubernetes/main.go").is_file())
"""
OFFLINE = """
from mizzen import LLM, SamplingParams
import mizzen
with LLM("demo", device="cpu", kv_cache_tokens=512) as llm:
    prompts = ["Question: What is a group?\\nAnswer:"]
    answer = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))[0]
print(mizzen.__file__, answer.text)
"""
COMMAND = "import sys; from mizzen.cli import main; sys.argv[0] = 'mizzen'; main()"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    files = contents(wheel)
    (name,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(files[name])


def test_the_wheel_contains_every_file_of_its_packages_and_the_shared_folders(built: Built) -> None:
    names = set(contents(built.wheel))
    expected = set()
    places = {"worker": "", "operator": "", **dict.fromkeys(SHARED, "mizzen/share/")}
    for folder, prefix in places.items():
        start = ROOT if prefix else ROOT / folder
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
                expected.add(prefix + path.relative_to(start).as_posix())
    assert len(expected) > 500
    assert expected <= names, sorted(expected - names)[:10]
    own = {name for name in names if ".dist-info/" not in name}
    assert own == expected, sorted(own - expected)[:10]


def test_the_sdist_builds_the_same_wheel(built: Built) -> None:
    wheel, again = contents(built.wheel), contents(built.wheel_of_sdist)
    assert wheel.keys() == again.keys()
    assert not [name for name, data in wheel.items() if data != again[name]]


def test_the_sdist_has_the_licence_and_what_a_build_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "setup.py"} <= names
    assert not {name for name in names if name.startswith(("tests/", "docs/", ".ci/"))}


def test_the_metadata_name_the_licence_the_project_and_its_extras(built: Built) -> None:
    described = metadata(built.wheel)
    assert described["License-Expression"] == "Apache-2.0"
    assert described.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert described["Author"] == "The Mizzen authors"
    assert "Typing :: Typed" in described.get_all("Classifier", [])
    urls = dict(line.split(", ") for line in described.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in urls.values())
    assert {"gateway", "worker", "operator", "local"} <= set(described.get_all("Provides-Extra", []))


def test_the_programs_find_their_files_outside_the_repository(installed: Installed) -> None:
    run = installed.run(LOCAL_FILES)
    assert run.stdout.split() == ["True"] * 5, run.stderr


def test_inspect_reads_the_packaged_demo_model(installed: Installed) -> None:
    run = installed.run(COMMAND, "inspect", "demo")
    assert run.returncode == 0, run.stderr
    assert "2,048 tokens" in run.stdout


def test_the_packaged_demo_model_answers(installed: Installed, answers: dict[str, str]) -> None:
    run = installed.run(OFFLINE)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(installed.site))
    assert answers["What is a group?"] in run.stdout


def test_a_folder_named_demo_takes_precedence_over_the_packaged_model(installed: Installed) -> None:
    folder = installed.empty / "demo"
    folder.mkdir()
    try:
        run = installed.run(COMMAND, "inspect", "demo")
    finally:
        folder.rmdir()
    assert run.returncode == 2
    assert "config.json" in run.stderr


def test_the_readme_renders_on_a_package_index_with_absolute_links_only(built: Built) -> None:
    described = metadata(built.wheel)
    assert described["Description-Content-Type"] == "text/markdown"
    text = described.get_payload()
    assert isinstance(text, str)
    page = markdown.render(text, stream=None)
    assert page
    assert "<table>" in page
    links = re.findall(r'href="([^"]*)"', page)
    base = f"https://github.com/mizzen-dev/mizzen/blob/v{described['Version']}/"
    assert f"{base}docs/install.md" in links
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    assert not [link for link in links if link.startswith(base) and not (ROOT / link[len(base) :]).exists()]
    assert "skip:" not in text
    assert "run: " not in text

# SPDX-License-Identifier: Apache-2.0
"""The scripts that build container images are tested one by one; `make e2e` tests the images."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import msgspec  # noqa: F401  # its module is an example of a library
import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "scripts/images"
CHART_TESTS = "mizzen/share/charts/mizzen/templates/tests"
"""The tests of the chart in the installed package, which `helm test` runs."""


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(IMAGES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_image_installs_the_requirements_of_its_extras_only() -> None:
    result = script("requirements.py", str(ROOT / "pyproject.toml"), "base", "worker", "--without", "Torch")
    names = [line.split(">")[0] for line in result.stdout.splitlines()]
    assert "msgspec" in names
    assert "safetensors" in names
    assert not {"torch", "fastapi", "kubernetes"} & set(names)
    assert len(names) == len(set(names))


def test_an_unknown_extra_is_refused_by_name() -> None:
    result = script("requirements.py", str(ROOT / "pyproject.toml"), "gatway")
    assert result.returncode != 0
    assert "unknown extra gatway; choose from base, " in result.stderr


def test_the_gpu_image_has_the_measured_versions(tmp_path: Path) -> None:
    merged = script("merge_constraints.py", str(ROOT / "constraints.txt"), str(ROOT / "constraints-gpu.txt"))
    pins = merged.stdout.splitlines()
    gpu = [line for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if "==" in line]
    assert set(gpu) <= set(pins)
    assert len([line for line in pins if line.startswith("torch==")]) == 1
    assert "xgrammar==0.2.8" in pins
    engine = (ROOT / "Dockerfile.worker").read_text().split("FROM build AS engine-site\n")[1]
    assert engine.startswith("RUN OVERRIDES=constraints-gpu.txt sh scripts/images/install.sh")
    broken = tmp_path / "broken.txt"
    broken.write_text("torch>=2\n")
    assert "'torch>=2' is not the only pin" in script("merge_constraints.py", str(broken), "/dev/null").stderr


def test_releases_build_on_the_base_image_of_the_dockerfile() -> None:
    base = re.search(r"^ARG BASE=(.+)$", (ROOT / "Dockerfile.worker").read_text(), re.MULTILINE)
    assert base
    for name in ("build_images.py", "dry_run.py"):
        assert f'"--base", default="{base[1]}"' in (ROOT / "scripts/release" / name).read_text()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder with a Kubernetes client, a package with tests, and folders that must stay."""
    for name in ("kubernetes/client/__init__.py", "kubernetes/__init__.py", "other/tests/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "kubernetes/client/pod.py").write_text("class Pod:\n    phase = 'Running'\n")
    for name in ("numpy/testing", CHART_TESTS):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_an_archived_client_package_can_be_imported(site: Path) -> None:
    assert script("slim.py", str(site)).returncode == 0
    assert not (site / "kubernetes").exists()
    assert not (site / "other/tests").exists()
    assert (site / "numpy/testing").is_dir()
    assert (site / CHART_TESTS).is_dir()
    load = f"import site; site.addsitedir({str(site)!r})"
    code = f"{load}; from kubernetes.client.pod import Pod; print(Pod.phase)"
    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert shown.stdout == "Running\n", shown.stderr


def test_a_package_with_binary_modules_is_not_archived(site: Path) -> None:
    (site / "kubernetes/fast.so").write_bytes(b"")
    result = script("slim.py", str(site))
    assert result.returncode != 0
    assert "kubernetes contains fast.so" in result.stderr
    assert (site / "kubernetes").is_dir()


def test_the_license_texts_of_all_distributions_are_collected(tmp_path: Path) -> None:
    site, target = tmp_path / "site", tmp_path / "licenses"
    files = {
        "one": (
            "License-Expression: MIT",
            {"licenses/LICENSE": "MIT text", "licenses/vendor/NOTICE": "Notice"},
        ),
        "two": ("Classifier: License :: OSI Approved :: BSD License", {"COPYING": "BSD text"}),
        "three": ("License: none given", {}),
    }
    for name, (header, texts) in files.items():
        folder = site / f"{name}-1.0.dist-info"
        for path, text in {"METADATA": f"Name: {name}\nVersion: 1.0\n{header}\n", **texts}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        record = [f"{folder.name}/{path},," for path in ("METADATA", *texts)]
        (folder / "RECORD").write_text("\n".join([*record, f"{name}/__init__.py,,"]))
    result = script("licenses.py", str(site), str(target))
    assert result.returncode == 0, result.stderr
    index = (target / "index.txt").read_text().splitlines()
    assert index == ["one 1.0\tMIT\t2", "three 1.0\tnone given\t0", "two 1.0\tBSD License\t1"]
    assert (target / "one-1.0/licenses/vendor/NOTICE").read_text() == "Notice"
    assert (target / "two-1.0/COPYING").read_text() == "BSD text"


def test_every_image_collects_licenses_before_files_are_removed() -> None:
    steps = (IMAGES / "finish.sh").read_text()
    assert 0 < steps.index("licenses.py") < steps.index("slim.py")


def test_the_wheel_stage_copies_everything_that_the_build_reads() -> None:
    stage = (ROOT / "Dockerfile.worker").read_text().split("AS wheel\n")[1].split("\nFROM ")[0]
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", stage, re.MULTILINE) for name in line.split()}
    needed = {"LICENSE", "NOTICE", "README.md", "setup.py", "worker", "operator"}
    assert needed | {"crds", "charts", "examples", "models/demo"} == copied
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert not [name for name in copied if not any(entry.startswith(name) for entry in seen)]


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """The compiler of the engine image, where TCC prints its arguments and writes the library `module.so`."""
    home = tmp_path / "libexec/tcc"
    for name in ("lib/libcuda.so.1", "include/search.txt", "libtcc1.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("python\nusr/include\n" if name.endswith("txt") else "")
    module = Path(sys.modules["msgspec._core"].__file__ or "").read_bytes()
    (tmp_path / "module.so").write_bytes(drop_stack_header(module))
    (home / "tcc").write_text(f'#!/bin/sh\necho "$@"\ncp {tmp_path}/module.so {tmp_path}/out.so\n')
    (home / "tcc").chmod(0o755)
    (tmp_path / "libexec/cc").write_text((IMAGES / "cc.py").read_text())
    return tmp_path / "libexec/cc"


def stack_headers(library: bytes) -> list[int]:
    """Return the offsets of the program headers PT_GNU_STACK of an ELF file."""
    (table,), (size, count) = struct.unpack_from("<Q", library, 32), struct.unpack_from("<HH", library, 54)
    offsets = range(table, table + size * count, size)
    return [offset for offset in offsets if struct.unpack_from("<I", library, offset)[0] == 0x6474E551]


def drop_stack_header(library: bytes) -> bytes:
    """Return an ELF file without PT_GNU_STACK, like those of TCC."""
    changed = bytearray(library)
    for offset in stack_headers(library):
        struct.pack_into("<I", changed, offset, 0)
    return bytes(changed)


def test_the_compiler_of_the_engine_image_reads_only_its_own_files(compiler: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-IS", str(compiler), "module.c", "-O3", "-I/folder", "-l:libcuda.so.1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    home = tmp_path / "libexec/tcc"
    search = f"-I{home}/include/python -I{home}/include/usr/include"
    library = f"module.c -O3 -I/folder {home}/lib/libcuda.so.1 {home}/libtcc1.a"
    assert shown.stdout == f"-B{home} -nostdlib -nostdinc {search} {library}\n"
    refused = subprocess.run([*command, "-lm"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("cc: -lm: the image has only a compiler for modules of Triton")


def test_modules_of_the_engine_image_forbid_an_executable_stack(compiler: Path, tmp_path: Path) -> None:
    module = tmp_path / "out.so"
    command = [sys.executable, "-IS", str(compiler), "module.c", "-shared", "-o", str(module)]
    assert not stack_headers((tmp_path / "module.so").read_bytes())
    subprocess.run(command, capture_output=True, check=True)
    [header] = stack_headers(module.read_bytes())
    assert struct.unpack_from("<I", module.read_bytes(), header + 4) == (6,)  # readable and writable
    load = f"import ctypes; assert ctypes.PyDLL({str(module)!r}).PyInit__core"
    subprocess.run([sys.executable, "-c", load], check=True)


def test_the_engine_image_depends_on_the_check_of_its_compiler() -> None:
    stages = (ROOT / "Dockerfile.worker").read_text().split("\nFROM ")
    [check] = [stage for stage in stages if stage.startswith("rootfs AS launchers")]
    assert check.index("USER 10001:10001") < check.index("check_launchers.py > /tmp/launchers.txt")
    [engine] = [stage for stage in stages if stage.startswith("runtime AS engine\n")]
    assert "COPY --from=launchers /tmp/launchers.txt" in engine
    for stage in (check, engine):
        assert "CC=/opt/mizzen/libexec/cc" in stage


def test_the_bill_of_materials_and_the_licenses_list_debian_packages(tmp_path: Path) -> None:
    bill, packages = tmp_path / "mizzen.cdx.json", tmp_path / "debian-packages.json"
    bill.write_text('{"components": [{"name": "one"}]}')
    packages.write_text('{"tcc": "0.9+git-2"}')
    assert script("add_packages.py", str(bill), str(packages)).returncode == 0
    first, second = json.loads(bill.read_text())["components"]
    assert (first["name"], second["name"], second["version"]) == ("one", "tcc", "0.9+git-2")
    assert second["purl"] == "pkg:deb/debian/tcc@0.9%2Bgit-2?arch=amd64"
    assert script("licenses.py", str(tmp_path / "none"), str(tmp_path / "licenses")).returncode == 0
    assert (tmp_path / "licenses/index.txt").read_text() == "tcc 0.9+git-2\tsee its text\t1\n"


def test_final_image_stages_only_copy_files() -> None:
    stages = (ROOT / "Dockerfile.worker").read_text().split("\nFROM ")[1:]
    final = {stage.split()[2]: stage for stage in stages if stage.startswith(("scratch AS", "runtime AS"))}
    assert set(final) == {"runtime", "operator", "gateway", "engine-cpu", "engine"}
    for name, stage in final.items():
        assert "\nRUN " not in stage, name
    assert "\nUSER 10001:10001\n" in final["runtime"]

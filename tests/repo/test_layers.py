# SPDX-License-Identifier: Apache-2.0
"""The import rules of docs/architecture.md, checked in the source and in running interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from source_code import parse_source

ROOT = Path(__file__).parents[2]
LAYERS = {
    "common",
    "core",
    "quantization",
    "layers",
    "attention",
    "models",
    "weights",
    "parallel",
    "kernels",
}
MAY_IMPORT: dict[str, set[str]] = {
    "common": {"common"},
    "core": {"common", "core"},
    "wire": {"common", "core", "wire"},
    "images": {"common", "core", "images"},
    "quantization": {"common", "models", "quantization"},
    "layers": LAYERS,
    "attention": LAYERS,
    "models": LAYERS,
    "weights": LAYERS,
    "parallel": LAYERS,
    "kernels": LAYERS,
    "engine": LAYERS | {"images", "engine"},
    "server": LAYERS | {"images", "engine", "wire", "server"},
    "gateway": {"common", "core", "images", "wire", "gateway"},
    "fetch": {"common", "core", "fetch", "inspection"},
    "inspection": {"engine", "images", "inspection", "layers", "models", "quantization", "weights"},
    "offline": LAYERS | {"images", "engine", "wire", "server", "gateway", "offline", "progress"},
    "lang": {"core", "gateway", "lang", "offline"},
    "commands": LAYERS
    | {"images", "engine", "wire", "server", "gateway", "fetch", "inspection", "commands", "offline"},
}
OPERATOR = "operator/mizzen_operator"
OPERATOR_ORDER = (
    "api",
    "kube",
    "resources",
    "pods",
    "gateway_client",
    "keys",
    "gateway",
    "rollout",
    "readiness",
    "model_cache",
    "autoscaling",
    "status",
    "reconciler",
    "manager",
    "informers",
    "main",
)
"""Packages of the operator in order; each may import only the packages before it."""
OPERATOR_BASE = {"config", "metrics"}
"""Modules of the operator that every package may import; they import only each other and `api`."""
OPERATOR_PROGRAMS = {"check": {"api", "kube"}, "chart": {"api", "kube"}, "cli": {"main"}}
"""Modules that only `main` and other programs import, each with the packages that the module may import."""
NO_TORCH = (
    "common",
    "core",
    "images",
    "wire",
    "gateway",
    "fetch",
    "inspection",
    "lang",
    "commands",
    "quantization",
)


def imports(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(parse_source(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
    return modules


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_allowed_packages(package: str) -> None:
    for path in sources(f"worker/mizzen/{package}"):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] not in ("mizzen_operator", "mizzen_local"), f"{path} imports {name}"
            if parts[0] == "mizzen" and len(parts) > 1:
                assert parts[1] in MAY_IMPORT[package], f"{path} imports {name}"


@pytest.mark.parametrize("package", NO_TORCH)
def test_packages_without_torch_do_not_import_torch(package: str) -> None:
    for path in sources(f"worker/mizzen/{package}"):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "triton", "transformers"}, path


def test_every_package_has_an_import_rule() -> None:
    packages = {path.parent.name for path in (ROOT / "worker/mizzen").glob("*/__init__.py")}
    assert packages <= set(MAY_IMPORT)


def test_the_operator_imports_nothing_of_the_worker() -> None:
    for path in sources("operator/mizzen_operator"):
        for name in imports(path):
            assert name.split(".")[0] != "mizzen", f"{path} imports {name}"
        assert not {name for name in imports(path) if name.startswith("mizzen_local")}, path


def test_mizzen_local_imports_only_common_modules_of_the_worker() -> None:
    for path in sources("operator/mizzen_local"):
        for name in imports(path):
            assert name.split(".")[0] != "mizzen" or name.startswith("mizzen.common."), f"{path}: {name}"


def operator_imports(package: str) -> dict[Path, set[str]]:
    """Return the operator's packages and top-level modules that each file of `package` imports."""
    folder = ROOT / OPERATOR / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    imported: dict[Path, set[str]] = {}
    for path in files:
        imported[path] = set()
        for node in ast.walk(parse_source(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mizzen_operator":
                inner = (node.module or "").split(".")[1:]
                imported[path] |= {inner[0]} if inner else {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
                imported[path] |= {
                    name[1] for name in names if name[0] == "mizzen_operator" and len(name) > 1
                }
        imported[path] -= {package}
    return imported


@pytest.mark.parametrize("package", OPERATOR_ORDER)
def test_a_package_of_the_operator_imports_only_earlier_packages(package: str) -> None:
    allowed = {*OPERATOR_ORDER[: OPERATOR_ORDER.index(package)], *OPERATOR_BASE}
    allowed |= set(OPERATOR_PROGRAMS) if package == "main" else set()
    for path, imported in operator_imports(package).items():
        assert imported <= allowed, f"{path} imports {', '.join(sorted(imported - allowed))}"


@pytest.mark.parametrize("module", sorted({*OPERATOR_BASE, *OPERATOR_PROGRAMS}))
def test_a_top_level_module_of_the_operator_imports_only_allowed_packages(module: str) -> None:
    allowed = {"api", *OPERATOR_BASE, *OPERATOR_PROGRAMS.get(module, set())}
    for path, imported in operator_imports(module).items():
        assert imported <= allowed, f"{path} imports {', '.join(sorted(imported - allowed))}"


def test_every_package_of_the_operator_is_in_the_order() -> None:
    modules = [
        *(ROOT / OPERATOR).glob("*.py"),
        *(path.parent for path in (ROOT / OPERATOR).glob("*/__init__.py")),
    ]
    packages = {path.stem for path in modules if path.stem != "__init__"}
    assert packages == {*OPERATOR_ORDER, *OPERATOR_BASE, *OPERATOR_PROGRAMS}


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "mizzen",
        "mizzen.gateway.app",
        "mizzen.server.supervisor",
        "mizzen.server.ranks.simulated",
        "mizzen.cli",
        "mizzen.fetch.run",
        "mizzen.inspection.text",
    ],
)
def test_light_programs_do_not_load_torch(module: str) -> None:
    assert (
        python(f"import sys, {module}; print('torch' in sys.modules, 'transformers' in sys.modules)")
        == "False False"
    )


@pytest.mark.parametrize("module", ["mizzen.gateway.main", "mizzen.gateway.http.child_process"])
def test_a_serving_gateway_does_not_load_the_http_client(module: str) -> None:
    assert python(f"import sys, {module}; print('httpx' in sys.modules)") == "False"


def test_loading_an_engine_imports_neither_transformers_nor_the_compiler_of_pytorch() -> None:
    """TorchDynamo takes as long to import as everything else that an engine imports."""
    heavy = {"torch._dynamo", "sympy", "transformers"}
    assert python(f"import sys, mizzen.engine.loading.loader; print({heavy} & set(sys.modules))") == "set()"


def test_import_operator_loads_the_standard_library() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    path = python("import operator; print(operator.__file__)")
    assert Path(path).parent == Path(sysconfig.get_path("stdlib"))


def test_helper_modules_of_tests_have_unique_names() -> None:
    # All these folders are on `sys.path` of one process, so of two modules with one name, one is hidden.
    places: dict[str, list[str]] = {}
    folders = ("benchmarks", "scripts", "tests/*")
    for path in sorted(path for folder in folders for path in ROOT.glob(f"{folder}/*.py")):
        if path.stem != "conftest" and not path.stem.startswith(("test_", "__")):
            places.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}

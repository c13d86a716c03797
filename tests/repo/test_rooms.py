"""The import rules of docs/architecture.md, read off the source and off running interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {"common", "core", "layers", "attention", "models", "weights", "parallel", "kernels"}
MAY_IMPORT: dict[str, set[str]] = {
    "common": {"common"},
    "core": {"common", "core"},
    "wire": {"common", "core", "wire"},
    "layers": LAYERS,
    "attention": LAYERS,
    "models": LAYERS,
    "weights": LAYERS,
    "parallel": LAYERS,
    "kernels": LAYERS,
    "engine": LAYERS | {"engine"},
    "server": LAYERS | {"engine", "wire", "server"},
    "gateway": {"common", "core", "wire", "gateway"},
    "fetch": {"common", "core", "fetch"},
    "offline": LAYERS | {"engine", "wire", "server", "gateway", "offline", "progress"},
    "commands": LAYERS | {"engine", "wire", "server", "gateway", "fetch", "commands", "offline"},
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
"""Packages of the operator: each imports only packages before it."""
OPERATOR_BASE = {"config", "metrics"}
"""Modules of the operator that every package may import; they import only each other and `api`."""
OPERATOR_PROGRAMS = {"check": {"api", "kube"}, "chart": {"api", "kube"}}
"""Modules that only `main` and other programs import, with the packages that they may import."""
NO_TORCH = ("common", "core", "wire", "gateway", "fetch", "commands")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_downwards_only(room: str) -> None:
    for path in sources(f"worker/mizzen/{room}"):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] not in ("mizzen_operator", "mizzen_local"), f"{path} imports {name}"
            if parts[0] == "mizzen" and len(parts) > 1:
                assert parts[1] in MAY_IMPORT[room], f"{path} imports {name}"


@pytest.mark.parametrize("room", NO_TORCH)
def test_light_rooms_do_not_name_torch(room: str) -> None:
    for path in sources(f"worker/mizzen/{room}"):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "triton", "transformers"}, path


def test_every_room_is_in_the_table() -> None:
    rooms = {path.parent.name for path in (ROOT / "worker/mizzen").glob("*/__init__.py")}
    assert rooms <= set(MAY_IMPORT)


def test_the_operator_imports_nothing_of_the_worker() -> None:
    for path in sources("operator"):
        for name in imports(path):
            assert name.split(".")[0] != "mizzen", f"{path} imports {name}"
    for path in sources("operator/mizzen_operator"):
        assert not {name for name in imports(path) if name.startswith("mizzen_local")}, path


def operator_imports(part: str) -> dict[Path, set[str]]:
    """Return the parts of the operator that each file of a package, or a top-level module, imports."""
    folder = ROOT / OPERATOR / part
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    found: dict[Path, set[str]] = {}
    for path in files:
        found[path] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mizzen_operator":
                inner = (node.module or "").split(".")[1:]
                found[path] |= {inner[0]} if inner else {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
                found[path] |= {name[1] for name in names if name[0] == "mizzen_operator" and len(name) > 1}
        found[path] -= {part}
    return found


@pytest.mark.parametrize("part", OPERATOR_ORDER)
def test_a_package_of_the_operator_imports_only_packages_before_it(part: str) -> None:
    allowed = {*OPERATOR_ORDER[: OPERATOR_ORDER.index(part)], *OPERATOR_BASE}
    allowed |= set(OPERATOR_PROGRAMS) if part == "main" else set()
    for path, imported in operator_imports(part).items():
        assert imported <= allowed, f"{path} imports {', '.join(sorted(imported - allowed))}"


@pytest.mark.parametrize("part", sorted({*OPERATOR_BASE, *OPERATOR_PROGRAMS}))
def test_a_module_beside_the_operators_packages_imports_only_the_lowest_ones(part: str) -> None:
    allowed = {"api", *OPERATOR_BASE, *OPERATOR_PROGRAMS.get(part, set())}
    for path, imported in operator_imports(part).items():
        assert imported <= allowed, f"{path} imports {', '.join(sorted(imported - allowed))}"


def test_every_package_of_the_operator_is_in_the_order() -> None:
    modules = [
        *(ROOT / OPERATOR).glob("*.py"),
        *(path.parent for path in (ROOT / OPERATOR).glob("*/__init__.py")),
    ]
    parts = {path.stem for path in modules if path.stem != "__init__"}
    assert parts == {*OPERATOR_ORDER, *OPERATOR_BASE, *OPERATOR_PROGRAMS}


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
    ],
)
def test_light_programs_leave_torch_out(module: str) -> None:
    assert (
        python(f"import sys, {module}; print('torch' in sys.modules, 'transformers' in sys.modules)")
        == "False False"
    )


@pytest.mark.parametrize("module", ["mizzen.gateway.main", "mizzen.gateway.http.child_process"])
def test_a_gateway_that_serves_leaves_the_http_client_out(module: str) -> None:
    assert python(f"import sys, {module}; print('httpx' in sys.modules)") == "False"


def test_operator_stays_the_standard_librarys() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    found = python("import operator; print(operator.__file__)")
    assert Path(found).parent == Path(sysconfig.get_path("stdlib"))


def test_no_two_helpers_that_tests_import_have_one_name() -> None:
    # Their folders are all on the path of one process, where the first of a name hides the other.
    places: dict[str, list[str]] = {}
    for path in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/*/*.py")]):
        if path.stem != "conftest" and not path.stem.startswith(("test_", "__")):
            places.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}

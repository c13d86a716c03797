# SPDX-License-Identifier: Apache-2.0
"""Install TCC as the C compiler of the image `engine`: `libexec/cc`, and its files in `libexec/tcc`.

Only the headers that Triton's modules include are copied. `share/debian-packages.json` lists the packages of
all copied files, for the bill of materials; `share/licenses` gets their license texts.

    /opt/mizzen/bin/python scripts/images/install_compiler.py /opt/mizzen
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from launchers import TRITON_HEADERS, module_sources

CC = Path(__file__).with_name("cc.py")


def output(*command: str | Path) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def package_files(package: str) -> list[Path]:
    """Return the files of an installed Debian package."""
    return [Path(line) for line in output("dpkg-query", "--listfiles", package).splitlines()]


def include_folders(home: Path) -> list[Path]:
    """Return the include folders in the order of their search; `home` has TCC's own headers in `include`."""
    multiarch = str(sysconfig.get_config_var("MULTIARCH"))
    python = Path(sysconfig.get_paths(scheme="posix_prefix")["include"])
    return [home / "include", python, Path("/usr/include") / multiarch, Path("/usr/include")]


def find_headers(tcc: Path, home: Path) -> set[Path]:
    """Return the headers in `include_folders` that Triton's modules include."""
    folders = include_folders(home)
    # TCC lists dependencies in folders of -I only.
    search = ["-nostdinc", *(f"-I{folder}" for folder in folders), f"-I{TRITON_HEADERS}"]
    found: set[Path] = set()
    with tempfile.TemporaryDirectory() as temporary:
        source, listing = Path(temporary, "module.c"), Path(temporary, "module.d")
        for text in module_sources().values():
            source.write_text(text)
            write = ["-o", source.with_suffix(".o"), "-MD", "-MF", listing]
            output(tcc, f"-B{home}", "-c", source, *search, *write)
            found |= {Path(line.strip(" \\")) for line in listing.read_text().splitlines()[1:]}
    return {path for path in found if any(path.is_relative_to(folder) for folder in folders)}


def install(target: Path) -> None:
    """Copy the compiler, its headers and an empty libcuda to `target`, and write the list of packages."""
    files = package_files("tcc")
    binary = next(path for path in files if path.name == "tcc" and path.parent.name == "bin")
    runtime = next(path for path in files if path.name == "libtcc1.a")
    home = target / "libexec/tcc"
    (home / "lib").mkdir(parents=True)
    shutil.copy(binary, home / "tcc")
    shutil.copy(runtime, home / "libtcc1.a")
    headers = find_headers(binary, runtime.parent)
    for header in headers:
        copy = home / "include" / header.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, copy)
    search = [folder.relative_to("/").as_posix() for folder in include_folders(runtime.parent)]
    (home / "include/search.txt").write_text("\n".join(search) + "\n")
    soname = ["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1"]
    with tempfile.NamedTemporaryFile(suffix=".c") as empty:
        output(binary, *soname, "-o", home / "lib/libcuda.so.1", empty.name)
    cc = target / "libexec/cc"
    cc.write_text(f"#!{target}/bin/python -IS\n{CC.read_text()}")
    cc.chmod(0o755)
    record_packages([binary, runtime, *headers], target / "share")


def record_packages(files: list[Path], share: Path) -> None:
    """Write the names and versions of the Debian packages of `files`, and copy their license texts."""
    versions: dict[str, str] = {}
    for file in sorted(set(files)):
        search = subprocess.run(["dpkg-query", "--search", file], capture_output=True, text=True, check=False)
        if search.returncode:  # headers of a Python that is not from Debian; the base image has its license
            continue
        package = search.stdout.partition(": ")[0].partition(":")[0]
        versions[package] = output("dpkg-query", "-W", "-f", "${Version}\n", package).splitlines()[0]
    for package, version in versions.items():
        copy = share / "licenses" / f"{package}-{version}"
        copy.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"/usr/share/doc/{package}/copyright", copy / "copyright")
    (share / "debian-packages.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]))

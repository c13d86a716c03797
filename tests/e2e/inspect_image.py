"""Look around in a running container and print what it is, as JSON. It needs Python and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "ld", "as", "nvcc", "make", "cargo", "rustc", "go")
INSTALLERS = ("apt", "apt-get", "pip", "pip3", "uv", "conda")


def own_files() -> tuple[int, list[str]]:
    """Return the bytes of all files of the image, and those that run as another user."""
    size, raised = 0, []
    root = os.stat("/").st_dev
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == root]
        for name in names:
            about = os.lstat(os.path.join(folder, name))
            if about.st_dev != root:
                continue
            size += about.st_size
            if about.st_mode & 0o6000 and not os.path.islink(os.path.join(folder, name)):
                raised.append(os.path.join(folder, name))
    return size, raised


def writable() -> list[str]:
    """Return the folders of the image that this user can write to."""
    tried = []
    for folder in ("/", "/opt/mizzen", "/etc", "/usr/lib", "/var"):
        try:
            Path(folder, "written").touch()
            tried.append(folder)
        except OSError:
            continue
    return tried


def main() -> None:
    """Print what is found; arguments are programs whose --help must work."""
    size, raised = own_files()
    boms = [json.loads(path.read_text()) for path in Path("/opt/mizzen/share/sbom").glob("*.cdx.json")]
    shown = [subprocess.run([*program.split(), "--help"], capture_output=True) for program in sys.argv[1:]]
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "gid": os.getgid(),
                "size": size,
                "raised": raised,
                "writable": writable(),
                "tools": [name for name in (*COMPILERS, *INSTALLERS) if shutil.which(name)],
                "help": [[one.returncode, len(one.stdout)] for one in shown],
                "components": sorted(part["name"] for bom in boms for part in bom["components"]),
                "described": [bom["metadata"]["component"]["name"] for bom in boms],
                "formats": [bom["bomFormat"] for bom in boms],
            }
        )
    )


main()

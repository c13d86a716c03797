# SPDX-License-Identifier: Apache-2.0
"""Generate docs/compatibility.md from the files that pin versions.

    python scripts/compatibility.py

A test checks that the page is up to date.
"""

from __future__ import annotations

import re
import tomllib

import yaml
from generated_pages import ROOT, write_pages

from mizzen_local.assets import KUBERNETES
from mizzen_local.helm import HELM

DRIVERS = {"12": "525", "13": "580"}
"""Oldest driver branch that runs a CUDA release of each major version, from NVIDIA's compatibility guide."""
HEAD = """\
# Compatibility

`scripts/compatibility.py` generates this page from the files that pin the versions. *Tested* versions run in
the tests of this repository. GPU tests and benchmarks ran with the versions of the GPU stack, and the image
`engine` contains exactly these versions.

"""
TAIL = """
Other GPUs and versions are not tested. If the engine cannot use them, its messages at startup say why.
Outside the image, install the tested GPU stack with:

<!-- skip: it installs gigabytes -->
```console
$ python scripts/images/merge_constraints.py constraints.txt constraints-gpu.txt > tested.txt
$ pip install --constraint tested.txt '.[worker,gateway,gpu]'
```
"""


def read_pins(name: str) -> dict[str, str]:
    """Return the versions in a constraints file, by distribution."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE))


def read_measured() -> dict[str, str]:
    """Return what constraints-gpu.txt says about the machines of its measurements, by first word."""
    text = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^# measured: (\S+) (.+)$", text, re.MULTILINE))


def page() -> str:
    """Return the text of the page."""
    chart = yaml.safe_load((ROOT / "charts/mizzen/Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = re.search(
        r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile.worker").read_text(encoding="utf-8"), re.MULTILINE
    )
    if base is None:
        raise ValueError("Dockerfile.worker does not have ARG BASE")
    cpu, gpu, measured = read_pins("constraints.txt"), read_pins("constraints-gpu.txt"), read_measured()
    cuda = ".".join(gpu["cuda-toolkit"].split(".")[:2])
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix("-0")
    rows = [
        ("component", "supported", "tested"),
        ("---", "---", "---"),
        ("Kubernetes", f"{oldest.removesuffix('.0')} or later", KUBERNETES),
        ("Helm", "3.17 or later", HELM),
        ("Python", f"{project['requires-python'].removeprefix('>=')} or later", f"in images: `{base[1]}`"),
        ("GPU", "NVIDIA", measured["GPU"]),
        ("NVIDIA driver", f"{DRIVERS[cuda.split('.')[0]]} or later", measured["driver"]),
    ]
    stack = [
        ("component", "image `engine`", "image `engine-cpu`, and tests without a GPU"),
        ("---", "---", "---"),
        ("CUDA", cuda, "–"),
        ("PyTorch", gpu["torch"], cpu["torch"]),
        ("Triton", gpu["triton"], "–"),
        ("[C compiler](images.md#the-compiler-of-the-engine-image) for Triton", "TCC of the base image", "–"),
        ("sglang-kernel (FlashAttention 3)", gpu["sglang-kernel"], "–"),
        ("flashinfer-python", gpu["flashinfer-python"], "–"),
        ("NCCL", gpu["nvidia-nccl-cu13"], "–"),
        ("Transformers", gpu["transformers"], cpu["transformers"]),
        ("XGrammar", cpu["xgrammar"], cpu["xgrammar"]),
        ("Python of the GPU tests", measured["Python"], "3.11 and later"),
    ]
    tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, stack)]
    return HEAD + "\n\n".join(tables) + "\n" + TAIL


PAGES = {"docs/compatibility.md": page}

if __name__ == "__main__":
    write_pages(PAGES)

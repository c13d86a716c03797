# SPDX-License-Identifier: Apache-2.0
"""Placement of a rank on a GPU, and on the CPUs near that GPU.

Rank processes call it before they load the model.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from mizzen.engine.config import EngineOptions
from mizzen.parallel.process_group import RankConfig

log = logging.getLogger(__name__)

PCI = Path("/sys/bus/pci/devices")
"""Folder in which Linux describes PCI devices."""


def rank_placement(options: EngineOptions, rank: int, rendezvous: str, address: str = "") -> RankConfig:
    """Return the configuration of a rank; the ranks of a pod have GPU 0, 1 and so on, in order.

    Args:
        options: Engine options.
        rank: Number of the rank.
        rendezvous: URL by which the ranks find each other, in a form that `RankConfig` describes.
        address: IP address at which other pods reach this pod; empty if all ranks are in one pod.
    """
    return RankConfig(
        rank=rank,
        size=options.tensor,
        rendezvous=rendezvous,
        device=torch.device("cpu")
        if options.device == "cpu"
        else torch.device("cuda", rank % options.local_ranks),
        all_reduce=options.all_reduce if options.nodes == 1 else "nccl",
        address=address,
    )


def pin_to_near_cpus(config: RankConfig) -> None:
    """Restrict this process to the CPUs near its GPU, if the machine reports them.

    Its memory is then near the GPU too, because Linux allocates a page near the CPU that first touches it.
    """
    if config.device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    torch.cuda.set_device(config.device)  # reading device properties may initialize the current device
    near = cpus_near(pci_address(config.device)) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
        log.info(
            "restricted the rank to the CPUs near its GPU",
            extra={"fields": {"rank": config.rank, "processors": len(near)}},
        )


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU in Linux's format, or an empty string if PyTorch does not report it."""
    properties = torch.cuda.get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""


def cpus_near(address: str, devices: Path = PCI) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node, or an empty set if the machine does not report them."""
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:
        return set()
    return parse_cpu_list(text)


def parse_cpu_list(text: str) -> set[int]:
    """Parse Linux's CPU list format, such as `0-3,8`; return an empty set for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return set()
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus

"""Where a rank of a pod runs: its GPU, and the processors next to it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from mizzen.engine.config import EngineOptions
from mizzen.parallel.process_group import Place

log = logging.getLogger(__name__)

PCI = Path("/sys/bus/pci/devices")


def local_place(options: EngineOptions, rank: int, rendezvous: str, address: str = "") -> Place:
    """Return the place of a rank in its pod: the first rank of a pod has GPU 0, the next GPU 1, and so on."""
    return Place(
        rank=rank,
        size=options.tensor,
        rendezvous=rendezvous,
        device=torch.device("cpu")
        if options.device == "cpu"
        else torch.device("cuda", rank % options.local_ranks),
        all_reduce=options.all_reduce if options.nodes == 1 else "nccl",
        address=address,
    )


def take_processors(place: Place) -> None:
    """Run this process on the processors next to its GPU, where the machine tells which those are.

    Memory then comes from there too: Linux gives a page to the processor that touches it first.
    """
    if place.device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    torch.cuda.set_device(place.device)  # what asks for its properties may set up the current one
    near = processors_near(pci_address(place.device)) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
        log.info("processors", extra={"fields": {"rank": place.rank, "processors": len(near)}})


def pci_address(device: torch.device) -> str:
    """Return a GPU's address on the PCI bus, as Linux writes it; empty when PyTorch does not tell."""
    found = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return ""


def processors_near(address: str, devices: Path = PCI) -> set[int]:
    """Return the processors of a PCI device's NUMA node; none where the machine does not tell."""
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:
        return set()
    return parse_list(text)


def parse_list(text: str) -> set[int]:
    """Read Linux's list of processors, such as `0-3,8`; what is no such list is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found

"""Which link there is between a device and the cold tier."""

from __future__ import annotations

import torch

from kvlens.memory.cuda_link import CudaLink, cuda_link
from kvlens.memory.ledger import Ledger
from kvlens.memory.link import HostLink, Link


def link_for(device: torch.device, ledger: Ledger) -> Link:
    """The link between `device` and the cold tier."""
    if device.type != "cuda":
        return HostLink(ledger)
    return cuda_link(device, ledger)


def link_name(device: torch.device) -> str:
    """What `link_for` would make, by its name."""
    return CudaLink.name if device.type == "cuda" else HostLink.name

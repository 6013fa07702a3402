"""Which device a run will take. `expected` asks the machine without loading torch; `settle` asks torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvlens.models.errors import UnsupportedModel
from kvlens.models.importing import uncollected

AUTO, CPU = "auto", "cpu"


def expected(device: str = AUTO) -> str:
    """'cuda' or 'cpu' for auto, by what is installed here: a torch with CUDA and a driver's device file. Other names as
    they are."""
    if device != AUTO:
        return device
    spec = importlib.util.find_spec("torch")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    built = any((Path(place) / "lib").glob("libtorch_cuda*") for place in places)
    return "cuda" if built and Path("/dev/nvidiactl").exists() else "cpu"


def settle(device: str) -> str:
    """The device's name, auto decided by torch: CUDA where there is one. Raises UnsupportedModel for a name that is not
    known and for CUDA where there is none."""
    with uncollected():
        import torch

    if device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UnsupportedModel(f"device '{device}' is not known: auto, cpu, cuda or cuda:N.")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedModel(
                f"device '{device}' was asked for, but this machine has no CUDA device; use --device cpu."
            )
        if index and int(index) >= torch.cuda.device_count():
            raise UnsupportedModel(f"device '{device}' was asked for, but there are {torch.cuda.device_count()}.")
    return device

"""The machine that a run takes: its free host memory and what the heap keeps of it, its device, the words that name it
in a trace. `expected` asks the machine without loading torch;
`settle` asks torch."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

from kvlens.collecting import uncollected
from kvlens.models.errors import UnsupportedModel

GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""where a control group of either version says its limit, what is used of it, and how much of that are files it can
forget"""


def host_bytes(system: Path = Path("/")) -> int | None:
    """Host memory that can still be had, by the kernel and by the limit that this process's group is under; None: not
    known."""

    def number(path: str, name: str) -> int:
        lines = (line.split() for line in (system / path).read_text(encoding="ascii").splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    rows = []
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        rows.append(1024 * number("proc/meminfo", "MemAvailable:"))
    for limit, used, stat, files in GROUPS:
        with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):  # 'max' is no limit, and no number
            most, now = (int((system / "sys/fs/cgroup" / name).read_text(encoding="ascii")) for name in (limit, used))
            rows.append(most - now + number(f"sys/fs/cgroup/{stat}", files))
    return max(0, min(rows)) if rows else None


LARGE = 8 << 20
"""bytes: larger blocks of memory are mapped one by one, and the system has them back as soon as they are freed"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of mallopt, as malloc.h has them"""


@cache
def _library() -> Any:
    """Return glibc, told once to keep large blocks apart; None on other systems, whose allocators give memory back by
    themselves.

    glibc keeps freed memory for the next allocation. By default it learns to take blocks of up to 32 MB from that
    memory. A small result that is made beside such a block stays when the block is freed, and the next block does not
    fit there any more: the process grows with every layer.
    """
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # no library of the process itself, as on Windows
        return None
    if not hasattr(library, "malloc_trim") or not hasattr(library, "mallopt"):
        return None
    library.mallopt(_MMAP_THRESHOLD, LARGE)
    library.mallopt(_TRIM_THRESHOLD, 2 * LARGE)
    return library


def give_back_heap() -> bool:
    """Give the system back what the heap keeps of freed memory. Return False where there is nothing to call."""
    library = _library()
    if library is None:
        return False
    library.malloc_trim(0)
    return True


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


def machine() -> dict[str, Any]:
    """Return the machine in words that name no host: processor model, cores, system; torch's threads where torch is
    loaded, and the CUDA device where one was used."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": (f"{platform.system()} {platform.machine()}"),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_initialized():
            facts["device"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""The device under test: timing, graphs, streams, pinned memory. `CudaDevice` is the one place with CUDA calls beside
`ledger.py`; `DryDevice` offers the same on the CPU, so that a dry run takes the same way through everything else.
"""

from __future__ import annotations

import gc
import itertools
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlens.lab.gpu.capture import captured

Step = Callable[[], object]


class DryDevice:
    """The CPU in the device's place: times are taken so that the code runs, and mean nothing."""

    dry = True
    at = torch.device("cpu")

    def __init__(self) -> None:
        torch.set_num_threads(1)  # tensors of a few KB: threads cost more than they save

    def facts(self) -> dict[str, Any]:
        """What the figures belong to."""
        return {
            "name": "dry run",
            "capability": "none",
            "memory_bytes": 0,
            "driver": "none",
            "clocks": "none",
            "free_bytes": 0,
        }

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "torch": torch.__version__, "triton": "none"}

    def times(self, step: Step, repeats: int) -> list[float]:
        """Seconds of each of `repeats` calls, one after the other."""
        values = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            values.append(time.perf_counter() - start)
        return values

    def capture(self, step: Step) -> Step:
        """A callable that repeats the step's launches, on the tensors that it has now."""
        step()
        return step

    def pinned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Host memory that the device can read in place."""
        return torch.empty(shape, dtype=dtype)

    def free_bytes(self) -> int:
        """Device memory that can still be had."""
        return 1 << 62

    def reset_peak(self) -> None:
        """Begin a new peak."""

    def peak_bytes(self) -> int | None:
        """Most device memory in use since `reset_peak`; None where there is none."""
        return None

    def release(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()

    def wait(self) -> None:
        """Until everything launched is done."""

    def alive(self) -> bool:
        """False after an error that makes every later call fail too."""
        return True

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers on the device."""
        return torch.empty(shape, dtype=dtype, device=self.at).normal_(0.0, scale)

    def per_call(self, steps: Sequence[Step], repeats: int) -> float:
        """Median seconds of one step out of several alike: they are launched as one graph, so that neither the launch
        nor what the last call left in the caches is measured. Their tensors together should be larger than the device's
        caches."""

        def all_of_them() -> None:
            for step in steps:
                step()

        return statistics.median(self.times(self.capture(all_of_them), repeats)) / len(steps)


class CudaDevice(DryDevice):
    """The first CUDA device."""

    dry = False
    at = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.set_device(self.at)

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.at)
        driver, *clocks = _nvidia_smi(
            "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu"
        )
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": driver,
            "clocks": "SM {}, memory {}, SM at most {}, power limit {}, {} C".format(*clocks),
            "free_bytes": self.free_bytes(),
        }

    def versions(self) -> dict[str, str]:
        import triton

        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
        }

    def times(self, step: Step, repeats: int) -> list[float]:
        step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [previous.elapsed_time(following) / 1e3 for previous, following in itertools.pairwise(events)]

    def capture(self, step: Step) -> Step:
        # kernels are compiled and libraries set up outside the capture
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(warm)
        graph, _ = captured(step, self.at)

        def replay(held: Step = step) -> None:
            """`held`: the graph reads and writes the step's tensors, so they have to outlive it."""
            graph.replay()

        return replay

    def pinned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        # after a capture that failed PyTorch gives nothing back to the driver any more, but takes from what it has
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def wait(self) -> None:
        torch.cuda.synchronize()

    def alive(self) -> bool:
        try:
            return torch.ones(1, device=self.at).item() == 1
        except RuntimeError:
            return False


def pick(dry_run: bool) -> DryDevice:
    """Raises ValueError with one sentence where there is no CUDA device and it is no dry run."""
    if dry_run:
        return DryDevice()
    if not torch.cuda.is_available():
        raise ValueError(
            "kvlens bench gpu needs a CUDA device and this machine has none; --dry-run tries the same code on the CPU."
        )
    return CudaDevice()


def p95(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]


def slug(name: str) -> str:
    """'NVIDIA H100 80GB HBM3' -> 'nvidia-h100-80gb-hbm3', for a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _nvidia_smi(*fields: str) -> list[str]:
    """Values as nvidia-smi prints them; 'unknown' for each where it does not answer."""
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [value.strip() for value in out.splitlines()[0].split(",")]
        return rows if len(rows) == len(fields) else ["unknown"] * len(fields)
    except (OSError, subprocess.SubprocessError, IndexError):
        return ["unknown"] * len(fields)

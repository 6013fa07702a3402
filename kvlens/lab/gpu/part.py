"""What a part of the benchmark is given, and what it is."""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvlens import PACKAGE, methods
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.floors import LLAMA_8B, TINY, Model
from kvlens.lab.gpu.rates import RateTable, read
from kvlens.lab.gpu.settings import OF_METHODS
from kvlens.lab.results.gpu import Row
from kvlens.methods.parts import part
from kvlens.models.find import SMOLLM2

HERE = Path(__file__).resolve().parent
POOL_BYTES = 4 << 30
"""host memory pinned at most; beyond it layers share the pool"""


@dataclass
class Bench:
    """What every part is given. `result`: what earlier parts found, ceilings among it."""

    device: DryDevice
    contexts: Sequence[int]
    batches: Sequence[int]
    result: dict[str, Any]
    rates: RateTable = field(default_factory=RateTable)
    kept: dict[str, Any] = field(default_factory=dict)
    """what several parts use and is dear to make"""
    offloaded: str = SMOLLM2
    """the model whose KV is offloaded, as `--model` names it"""
    runs: Path = Path("runs")
    """folder of the runs that are stored"""
    until: float = math.inf
    """on the monotonic clock: what can stop in its midst does so then"""

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def held(self, part: Part) -> list[dict[str, Any]]:
        """Rows that an earlier call has left of the part, by the code of today, and of what this call asks for."""
        entry = self.result["entries"].get(part.name)
        if entry is None or entry["sources"] != part.sources:
            return []
        return [row for row in entry["rows"] if part.asked is None or part.asked(self, row)]

    @property
    def dry(self) -> bool:
        return self.device.dry

    @property
    def model(self) -> Model:
        return TINY if self.dry else LLAMA_8B

    @property
    def repeats(self) -> int:
        """Calls that are timed, one by one."""
        return 3 if self.dry else 200

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name, else what `make` makes."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def keep_alone(self, name: str, make: Callable[[], Any]) -> Any:
        """The same, and what was kept under other names is given back first: a device has no room for two models."""
        if any(counterpart != name for counterpart in self.kept):
            self.kept = {counterpart: result for counterpart, result in self.kept.items() if counterpart == name}
            self.device.release()
        return self.keep(name, make)

    @cached_property
    def pool(self) -> torch.Tensor:
        """Units of pages in pinned host memory, [pages, H_kv, 2, 32, D]. Made once: pinning takes seconds."""
        kv = self.model.kv
        pages = 2048 if self.dry else POOL_BYTES // (kv.kv_heads * 32 * kv.head_token_bytes)
        pool = self.device.pinned(pages, kv.kv_heads, 2, 32, kv.head_dim)
        block = self.device.normal(min(pages, 1024), *pool.shape[1:])
        for start in range(0, pages, len(block)):
            pool[start : start + len(block)].copy_(block[: pages - start])
        return pool


@dataclass(frozen=True)
class Part:
    """`run` may give its rows one by one: those before a failure are kept. `files`: sources whose change makes an old
    entry stale, beside the kernels and what all parts share."""

    name: str
    run: Callable[[Bench], Iterable[Row]]
    files: tuple[str, ...]
    smaller: str
    """what to try when memory runs out"""
    runs_methods: bool = False
    """it makes steps of methods at recorded rates, so that other code or other rates make an old entry stale as well"""
    asked: Callable[[Bench, dict[str, Any]], bool] | None = None
    """whether a row of an earlier call is of what this call asks for; None: every row is"""

    @property
    def sources(self) -> str:
        """Digest of the code that measures, and of what it runs."""
        digest = hashlib.sha256()
        shared = [HERE / name for name in ("device.py", "part.py", "floors.py", *self.files)]
        for path in (*kernel_files(), *shared):
            digest.update(path.read_bytes())
        if self.runs_methods:
            for path in _of_methods():
                digest.update(path.read_bytes())
            digest.update(repr({name: line.rates for name, line in read().lines.items()}).encode())
        return digest.hexdigest()[:16]


def kernel_files() -> list[Path]:
    """Return the files of all kernels: those of runs, then those of the static step."""
    return [path for folder in (PACKAGE / "kernels", HERE / "kernels") for path in sorted(folder.glob("*.py"))]


def _of_methods() -> list[Path]:
    """The files of all methods' classes, and of what they say to the bench."""
    rows = []
    for method in methods.registry().values():
        sentence = part(method, "gpu", OF_METHODS)
        rows += [inspect.getfile(method), *([] if sentence is None else [inspect.getfile(sentence)])]
    return [Path(path) for path in rows]

"""What the cold tier costs the host: placing a prompt's spans in it, and bringing 1,000 of its units back.

`python -m kvlens.lab.studies.recall [out.json]` prints seconds (least of three), Python calls of the thread that
decides, and entries of the ledger. A file keeps what it was told under other labels: run it again on another version
of the code with another `--label`, `--about` saying what that version does, and the file holds both, each with its
machine, load, versions and day. Calls do not depend on the machine; seconds do, and on what else it does. Shapes are
SmolLM2-135M's: 30 layers, 3 KV heads, head size 64.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import BudgetAccount
from kvlens.engine.session import Session
from kvlens.link.codec import RawCodec
from kvlens.link.transfers import TransferLog
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Kept, Placement, Selection
from kvlens.methods.run_inputs import RunContext
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.tiers.layout import Layout, Zones
from kvlens.tiers.slots import PromptStore

SHAPE = KVShape(layers=30, q_heads=9, kv_heads=3, head_dim=64, itemsize=4)
SPANS, TOKENS = 130, 14
"""a prompt of 1.8k tokens in spans of 14 tokens"""
LAYERS, UNITS = 4, 250
"""layers that recall, and units in each recall"""
REPEATS = 3
CPU = torch.device("cpu")


def prompt(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, H_kv, n, D] of low rank and a little noise, as a model's spans are."""
    g = torch.Generator().manual_seed(0)
    size = (SHAPE.layers, SHAPE.kv_heads)
    keys, values = (
        torch.randn(*size, tokens, 6, generator=g) @ torch.randn(*size, 6, SHAPE.head_dim, generator=g)
        + 0.05 * torch.randn(*size, tokens, SHAPE.head_dim, generator=g)
        for _ in range(2)
    )
    return keys, values


def raw() -> Callable[[], Memory]:
    """Return what places a prompt in a memory: every span goes to the cold tier as it is."""
    n = SPANS * TOKENS
    store = PromptStore(SHAPE, torch.float32, CPU, n)
    keys, values = prompt(n)
    for layer in range(SHAPE.layers):
        store.append(layer, keys[layer], values[layer])
    memory = Memory(
        SHAPE, Layout(Zones(0, 0, n, 8), SPANS + 2, window_from=n), store, n, BudgetAccount(), TransferLog()
    )
    spans = [Span(i * TOKENS, (i + 1) * TOKENS, "page", "") for i in range(SPANS)]
    every, none = list(range(SPANS)), Kept.everywhere(torch.empty(0, dtype=torch.long))
    placement = Placement(spans, ["cold"] * SPANS, ["resident"] * SPANS, none, offload=every, codec=RawCodec())

    def place() -> Memory:
        memory.place_prompt(placement, store)
        return memory

    return place


def factors() -> Callable[[], Memory]:
    """Return SeKV's own placement of such a prompt, spans of several lengths as factors."""
    n, new = SPANS * TOKENS, 8
    method = methods.get("sekv")
    params = methods.make_parameters(method, None, {"form": "factors", "window": 64, "l_max": 20, "l_min": 8})
    full = SHAPE.full_kv_bytes(n + new)
    context = RunContext(SHAPE, n, new, None, full, 0, "random", torch.float32, CPU)
    session = Session(method, params, context)
    keys, values = prompt(n)
    for layer in range(SHAPE.layers):
        session.write(layer, keys[layer], values[layer])
        session.attend(layer, torch.randn(1, SHAPE.q_heads, n, SHAPE.head_dim), 0.125)
    surprisal = torch.rand(n, generator=torch.Generator().manual_seed(1)) ** 4 * 8

    def place() -> Memory:
        session.finish_prefill(surprisal)
        return session.memory

    return place


def wishes(memory: Memory) -> Selection:
    """UNITS spans that lie in the cold tier, in equal parts for the KV heads."""
    spans = [row.span for row in memory.spans.rows if row.state in ("cold", "coarse")]
    assert len(spans) * SHAPE.kv_heads >= UNITS, f"{len(spans)} spans are too few"
    requested = torch.full((SHAPE.kv_heads, -(-UNITS // SHAPE.kv_heads)), -1, dtype=torch.long)
    for unit in range(UNITS):
        place, head = divmod(unit, SHAPE.kv_heads)
        requested[head, place] = spans[place]
    fine = torch.ones(SHAPE.kv_heads, SHAPE.group, memory.spans.capacity, dtype=torch.bool)
    return Selection(fine, requested)


def recall(memory: Memory) -> None:
    selection = wishes(memory)
    for layer in range(LAYERS):
        memory.host.recaller.recall(layer, selection, later=False)


def measure(make: Callable[[], Callable[[], Memory]]) -> dict[str, Any]:
    """Placement and recall: their seconds, calls and entries of the ledger."""
    figures: dict[str, Any] = {}
    for profiled in (*([False] * REPEATS), True):
        place, memories = make(), list[Memory]()

        def placed(place: Callable[[], Memory] = place, memories: list[Memory] = memories) -> None:
            memories.append(place())

        def recalled(memories: list[Memory] = memories) -> None:
            recall(memories[0])

        for name, work in (("placement", placed), ("recall", recalled)):
            row = figures.setdefault(name, {"seconds": float("inf")})
            if name == "recall":
                memories[0].start_step(0)
            if profiled:
                profile = cProfile.Profile()
                profile.runcall(work)
                row["calls"] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
                row["entries"] = len(memories[0].transfers.opened)
            else:
                start_time = time.perf_counter()
                work()
                row["seconds"] = min(row["seconds"], time.perf_counter() - start_time)
        rows = memories[0].take_transfers()
        figures["placement"]["lines"] = sum(row.direction == "d2h" for row in rows)
        figures["recall"]["lines"] = sum(row.direction == "h2d" for row in rows)
        memories[0].host.link.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--label", default="now")
    parser.add_argument("--about", default="", help="what this version of the code does")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        figures = {"raw": measure(raw), "factors": measure(factors)}
    for form, parts in figures.items():
        for name, row in parts.items():
            print(
                f"{form} {name}: {row['seconds']:.3f} s, {row['calls']} Python calls, {row['entries']} ledger entries, "
                f"{row['lines']} lines"
            )
    if arguments.out is None:
        return
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    stored[arguments.label] = {
        "about": arguments.about,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **figures,
    }
    arguments.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()

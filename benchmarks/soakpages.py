"""The soak's pages: hostile URLs, and memory of a process that runs, stores and shows over and over."""

from __future__ import annotations

import os
import random
import statistics
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.soakforks import LONGEST_S, forked
from kvlens import PACKAGE

PAGES = ("replay", "heads", "memory", "spans", "method", "compare", "benchmarks", "run", "home")
FIELDS = (
    *("run", "step", "layer", "head", "span", "metric", "steps", "job", "whatif", "cmp", "agg"),
    *("proj", "neighbors", "color", "alpha", "method", "task", "depth", "length", "budget"),
)
VALUES = (
    *("", " ", "-1", "0", "3", "1.5", "1e999", "nan", "-inf", "9" * 40, "9" * 5000, "0x10", "１", "²", "true", "null"),
    *("[]", "{}", "[[0,", "../../etc/passwd", "/etc/passwd", "..\\..", "%00", "a\x00b", "a\nb", "\u202etxt", "\u2028"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "' OR 1=1 --", '"; DROP TABLE step; --', "$x$"),
    *(":material/home:", "[a](javascript:alert(1))", "{{7*7}}", "a" * 20_000, "💥" * 400, "5-2", "0-999999999", "-"),
)
SWEEP: dict[str, Any] = {
    "methods": ("full", "h2o"),
    "tasks": ("multikey",),
    "budgets": ("40%",),
    "lengths": (300,),
    "depths": (0.5,),
    "prompts": 1,
}
TOGETHER = 20
"""queries of one process"""
PAGE_S = 3 * LONGEST_S
"""a page that takes longer hangs: two runs of the app, on a machine that has other work"""
WARM = 0.25
"""share of the rounds that fill caches, before memory is compared"""
GROWTH = 1.05
LEAST_ROUNDS = 12
SWEEP_EVERY = 5
"""rounds"""


def _query(draw: random.Random, uid: str) -> dict[str, str]:
    mapping = {name: draw.choice((*VALUES, uid)) for name in draw.sample(FIELDS, draw.randint(1, 6))}
    if draw.random() < 0.5:
        mapping["run"] = uid
    if draw.random() < 0.2:
        mapping["".join(draw.choices(string.printable, k=8))] = draw.choice(VALUES)
    return mapping


def _show(page: str, query: dict[str, str]) -> bool:
    """Whether the page is drawn, whatever it says of the query, without an error that nobody foresaw."""
    from streamlit.testing.v1 import AppTest

    from kvlens.app.ui.common.widgets import FAILED

    app = AppTest.from_file(str(PACKAGE.parent / "app.py"), default_timeout=PAGE_S)
    app.run()
    for name, value in query.items():
        app.query_params[name] = value
    app.switch_page(f"pages/{page}.py")
    app.run()
    return not app.exception and not any(box.value.startswith(FAILED) for box in app.error)


def _run(folder: Path) -> str:
    from tests.synthetic import write_synthetic

    os.environ["KVLENS_RUNS"] = str(folder)
    os.chdir(PACKAGE.parent)
    return write_synthetic(folder, 2, 4, 2, steps=12, spans=8)


def visited(folder: Path, draw: random.Random) -> list[str]:
    """Outcomes of TOGETHER hostile queries: 'shown', 'error' (one that a page did not foresee), or how the process
    ended."""

    def visits() -> None:
        uid = _run(folder)
        for _ in range(TOGETHER):
            print("shown" if _show(draw.choice(PAGES), _query(draw, uid)) else "error", flush=True)

    outcome, sentence = forked(visits, longest_s=2 * PAGE_S)
    wording = [line for line in sentence.split() if line in ("shown", "error")]
    return wording if outcome == "done" else [*wording, outcome]


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _rounds(folder: Path, seconds: float) -> Iterator[int]:
    """Run on the demo model, recorded and stored; read; shown on a page; deleted; now and then a sweep of stored trials
    too. Bytes after each."""
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt
    from kvlens.lab.bench.sweep import SweepRequest, sweep
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.store.recover import delete_run
    from kvlens.text.prompts import PromptText

    _run(folder)
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        result = make_prompt("multikey", 300, 0.3, number, demo_encode())
        request = RunRequest(method=("snapkv", "freekv")[number % 2], budget="40%", max_new=8, ignore_eos=True)
        source = PromptText(result.text, result.answer, result.needle)
        uid, _, _ = carry_out(request, source, folder, lambda *_: None, lambda: False)
        assert _show("replay", {"run": uid})
        delete_run(folder, uid)
        if number % SWEEP_EVERY == 0:
            _, rows = sweep(SweepRequest(model="demo", first_seed=number, **SWEEP), folder, _silent)
            assert len(rows) == 3
            for row in rows:
                delete_run(folder, row["uid"])
        number += 1
        yield _resident()


def _silent(count: int, total: int, row: dict[str, Any]) -> None:
    pass


def flat(folder: Path, seconds: float) -> list[str]:
    """'flat' where what the process holds after its last rounds is within GROWTH of what it held once caches were full,
    medians of a quarter of the rounds each; else how much it grew. Nothing where there was time for too few rounds."""

    def rounds() -> None:
        for held in _rounds(folder, seconds):
            print("held", held, flush=True)

    outcome, sentence = forked(rounds, longest_s=seconds + PAGE_S)
    held = [int(line.split()[1]) for line in sentence.splitlines() if line.startswith("held ")]
    if outcome != "done":
        return [outcome]
    if len(held) < LEAST_ROUNDS:
        return []
    quarter = len(held) // 4
    start = statistics.median(held[int(WARM * len(held)) :][:quarter])
    last = statistics.median(held[-quarter:])
    return ["flat" if last <= GROWTH * start else f"grew by {last / start - 1:.0%} in {len(held)} rounds"]

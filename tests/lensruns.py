"""Made-up runs that belong together: one that lost, its forced repeat, a repeat with a span held, and runs without a
loss."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from writtenonce import written_once

from kvlens.lens import listing
from kvlens.store import runcatalogue
from tests.synthetic import write_synthetic

STEP = 9
"""the step of loss"""
SPAN = 5
"""the span that is held"""
SUMMARY = {
    "step": STEP,
    "kl_before": 2.25,
    "kl_after": 0.0004,
    "answer_before": "41<b>7</b>",
    "answer_after": "4172",
    "expected": "4172",
    "expected_from": "task",
    "restored": True,
    "agrees_after": True,
    "held_bytes": 12_300,
    "held_tokens": 8,
    "search": None,
}


@dataclass(frozen=True)
class LensRuns:
    folder: Path
    lost: str
    """free; lost at STEP of 12"""
    repeated: str
    """free; lost at STEP; has `forced` and `held`"""
    forced: str
    """repeats `repeated` on full KV's tokens"""
    held: str
    """repeats `repeated` with SPAN held for two KV heads from STEP on"""
    kept: str
    """compared, nothing lost"""
    plain: str
    """not compared, no full attention recorded"""
    full: str
    """full KV, the reference of the others"""


@written_once
def write_lens_runs(folder: Path) -> LensRuns:
    """Writes the runs into `folder`."""

    def write(name: str, number: int, **meta: object) -> str:
        known: dict[str, object] = {
            "prompt_tokens": 200,
            "needle": [[30, 60]],
            "answer": "4172",
            "reference": "20260301-000000-full",
        }
        return write_synthetic(folder, 2, 4, 2, 12, 14, seed=3, uid=f"20260301-00000{number}-{name}", **(known | meta))  # type: ignore[arg-type]

    full = write("full", 0, method="full", lens=False, reference=None, preset=None)
    lost = write("lost", 1)
    repeated = write("again", 2)
    forced = write("forced", 3, parent=repeated, forced=True)
    hold = {"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 1], [1, 0]], "from_step": STEP}
    held = write("held", 4, parent=repeated, hold=[hold], whatif=SUMMARY, loss_step=12)
    kept = write("kept", 5, loss_step=12)
    plain = write("plain", 6, lens=False, reference=None)
    return LensRuns(folder, lost, repeated, forced, held, kept, plain, full)


def without_facts(folder: Path, *uids: str) -> None:
    """Make the runs ones of a kvlens that wrote no facts into run.json, unknown to this process."""
    for uid in uids:
        path = folder / uid / "run.json"
        path.write_text(
            json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "facts"})
        )
    forget_runs()
    (folder / runcatalogue.FILE).unlink(missing_ok=True)


def forget_runs() -> None:
    """Begin as another process would."""
    runcatalogue._catalogue.cache_clear()
    listing.listing_of.cache_clear()

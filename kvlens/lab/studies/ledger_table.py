"""The tables of the loss-ledger study: shares of causes, repairs of one cause alone, distance to the oracle frontier,
and which signal of a step foresees the loss of its token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvlens.ledger.account import LossLedger
from kvlens.ledger.causes import CODES, REST
from kvlens.ledger.foresight import Track, foresight
from kvlens.statistics import wilson

FRONTIER = "frontier"
CLOSE = 0.05
"""share of the lost lead that the rest may have"""

Row = dict[str, Any]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return all tables of kept trials."""
    return {
        "methods": by_method(rows),
        "tasks": by_task(rows),
        "repairs": repairs(rows),
        "frontier": frontier(rows),
        "signals": foresight(tracks_of(rows)),
    }


def _ledgers(rows: Iterable[Row]) -> list[LossLedger]:
    return [LossLedger.from_json(row["ledger"]) for row in rows if row["lost"]]


def by_method(rows: Sequence[Row]) -> list[Row]:
    """Return per method: n (lost answers), asked (prompts that full KV answers), within (ledgers whose rest is at most
    CLOSE of the lead lost), and the mean share of each cause."""
    results = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != FRONTIER):
        method_rows = [row for row in rows if row["method"] == method]
        answerable = sum(row.get("right") is not None for row in method_rows)
        results.append({"method": method, "asked": answerable} | _shares(_ledgers(method_rows)))
    return results


def by_task(rows: Sequence[Row]) -> list[Row]:
    """Return the same per task and place of the question, over all methods."""
    keys = dict.fromkeys((row["task"], row["question"]) for row in rows)
    return [
        {"task": task, "question": question}
        | _shares(_ledgers(row for row in rows if (row["task"], row["question"]) == (task, question)))
        for task, question in keys
    ]


def _shares(ledgers: Sequence[LossLedger]) -> Row:
    ledgers_lost = [ledger for ledger in ledgers if ledger.lost > 0]
    shares = {
        cause: sum(ledger.logits(cause) / ledger.lost for ledger in ledgers_lost) / len(ledgers_lost)
        for cause in (*CODES, REST)
        if ledgers_lost
    }
    close = sum(abs(ledger.rest) <= CLOSE * ledger.lost for ledger in ledgers_lost)
    lost = float(np.mean([ledger.lost for ledger in ledgers_lost])) if ledgers_lost else None
    return {"n": len(ledgers_lost), "within": close, "lead_lost": lost, "shares": shares}


def repairs(rows: Sequence[Row]) -> Row:
    """Return the check by intervention: of lost answers with two causes or more, how many come back when the largest
    cause alone is repaired, and how many when the second largest is; the same by cause, whichever place it has."""
    several = [ledger for ledger in _ledgers(rows) if len(ledger.shares) > 1]
    ordered = [sorted(ledger.shares, key=lambda share: -share.logits) for ledger in several]
    places = [
        {"place": place + 1, **_count([shares[place].restored for shares in ordered if len(shares) > place])}
        for place in range(max(map(len, ordered), default=0))
    ]
    causes = [
        {"cause": cause, **_count([share.restored for shares in ordered for share in shares if share.cause == cause])}
        for cause in CODES
    ]
    alone = [ledger.shares[0].restored for ledger in _ledgers(rows) if len(ledger.shares) == 1]
    gained = sum(bool(shares[0].restored) and not any(share.restored for share in shares[1:]) for shares in ordered)
    missed = sum(not shares[0].restored and any(share.restored for share in shares[1:]) for shares in ordered)
    return {
        "several": len(several),
        "by_place": places,
        "by_cause": [row for row in causes if row["n"]],
        "only_cause": _count(alone),
        "largest_only": gained,
        "another_only": missed,
    }


def _count(restored: Sequence[bool | None]) -> Row:
    outcomes = [bool(back) for back in restored if back is not None]
    low, high = wilson(sum(outcomes) / len(outcomes), len(outcomes)) if outcomes else (None, None)
    return {"n": len(outcomes), "restored": sum(outcomes), "low": low, "high": high}


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the frontier's median share of full KV, and per method the median of its resident bytes over the
    frontier's, of answers that it kept and that it lost."""
    bytes_of = {row["index"]: row["frontier_bytes"] for row in rows if row.get("frontier_bytes")}
    shares = [row["frontier_bytes"] / row["full_bytes"] for row in rows if row.get("frontier_bytes")]
    results: list[Row] = [{"method": FRONTIER, "n": len(shares), "share": _median(shares)}]
    for method in dict.fromkeys(row["method"] for row in rows if row.get("peak_bytes")):
        method_rows = [
            row for row in rows if row["method"] == method and row.get("peak_bytes") and row["index"] in bytes_of
        ]
        times = {
            right: [row["peak_bytes"] / bytes_of[row["index"]] for row in method_rows if row["right"] is right]
            for right in (True, False)
        }
        results.append(
            {
                "method": method,
                "n": len(method_rows),
                "share": _median([row["peak_bytes"] / row["full_bytes"] for row in method_rows]),
                "kept": len(times[True]),
                "times_kept": _median(times[True]),
                "lost": len(times[False]),
                "times_lost": _median(times[False]),
            }
        )
    return results


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def tracks_of(rows: Sequence[Row]) -> list[Track]:
    """Return the steps of the kept trials that were followed."""
    return [row["signals"] for row in rows if row.get("signals")]

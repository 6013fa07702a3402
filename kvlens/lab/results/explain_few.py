"""Why the first five triples did not restore an answer: from the trials of `kvlens bench explain`. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

FIVE, TWENTY = "shown_top5", "shown_top20"
HEADS = 5
HALF = 0.5
"""of the answer's characters: an output that holds its first half lost a later token"""


def shortfalls(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of the lost trials that the first five triples did not restore.

    n; twenty: of these, restored by twenty; fewest: median, and least and most of the ranking that restore it, where
    twenty do; cut: of these, trials that five KV heads restore, a head with several spans among them; in_needle: mean
    of the five that are spans of the needle; needle_spans: mean spans of the needle; later: trials whose output with
    five held has the answer's first half, of `outputs` that are known. What no trial has is None."""
    short = [row for row in rows if row["lost"] and row.get(FIVE) is False]
    fewest = sorted(row["fewest"] for row in short if "fewest" in row)
    outputs = [begun_share(row["few_output"], row["answer"]) for row in short if "answer" in row]
    return {
        "n": len(short),
        "twenty": sum(bool(row.get(TWENTY)) for row in short),
        "fewest": [median(fewest), fewest[0], fewest[-1]] if fewest else None,
        "cut": sum(_count_heads(row) <= HEADS for row in short if "fewest" in row),
        "in_needle": _mean([row["in_needle"] for row in short if "in_needle" in row]),
        "needle_spans": _mean([row["needle_spans"] for row in short if "needle_spans" in row]),
        "outputs": len(outputs),
        "later": sum(share >= HALF for share in outputs),
    }


def _count_heads(row: Mapping[str, Any]) -> int:
    """Return how many KV heads the fewest triples that restore an answer are of."""
    return len({(layer, head) for layer, head, _ in row["ranking"][: row["fewest"]]})


def begun_share(output: str, answer: str) -> float:
    """Return the longest beginning of the answer that the output holds, as a share of the answer's characters."""
    target, text = answer.strip().casefold(), output.casefold()
    length = next(length for length in range(len(target), -1, -1) if target[:length] in text)
    return length / max(1, len(target))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None

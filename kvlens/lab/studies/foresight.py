"""Which recorded signal foresees the loss of a step's token, over stored runs.

    python -m kvlens.lab.studies.foresight [RUNS] [--out FILE]

Every step that was compared with full KV counts: its token is lost if the run's most probable token is not full KV's.
Varentropy is recorded by no trace; kvlens.lab.studies.loss_ledger measures it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from kvlens import methods
from kvlens.lab.studies.ledger_table import Track, foresight
from kvlens.runs.folder import runs_folder
from kvlens.store.reader import TraceError, TraceReader, list_runs


def track_of(reader: TraceReader) -> Track:
    """Return the signals of every step of a stored run that was compared with full KV, without those that feed a
    question."""
    loss, tokens = reader.loss().set_index("step"), reader.tokens()
    tokens = tokens[tokens["step"].notna()]
    entropy = dict(zip(tokens["step"].astype(int), tokens["next_entropy"].astype(float), strict=True))
    compared = [step for step in loss.index if step >= reader.meta.asked_steps]
    change, unread = (_head_means(reader, name) for name in ("qcos", "unread"))
    fetched, reused = (_kv_sums(reader, name) for name in ("n_recalled", "n_reused"))
    rows: Track = []
    for step in compared:
        moved = _at(fetched, step) + _at(reused, step)
        rows.append(
            {
                "lost": not bool(loss.at[step, "agrees"]),
                "entropy": _known(entropy.get(step, float("nan"))),
                "varentropy": None,
                "query_change": _known(1 - _at(change, step)),
                "fetched": _known(_at(fetched, step) / moved) if moved > 0 else None,
                "unread": _known(_at(unread, step)),
            }
        )
    return rows


def _at(values: np.ndarray | None, step: int) -> float:
    return float("nan") if values is None or step >= len(values) else float(values[step])


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _head_means(reader: TraceReader, metric: str) -> np.ndarray | None:
    """float64 [T]: mean over layers and query heads; None where it is not recorded."""
    if metric not in reader.metrics() or reader.meta.trace_level == "summary":
        return None
    cube = np.asarray(reader.head_cube(metric), np.float64)
    means = np.full(len(cube), np.nan)
    recorded = np.isfinite(cube).any((1, 2))
    means[recorded] = np.nanmean(cube[recorded], (1, 2))
    return means


def _kv_sums(reader: TraceReader, metric: str) -> np.ndarray | None:
    """float64 [T]: sum over layers and KV heads; None where it is not recorded."""
    if metric not in reader.kv_metrics() or reader.meta.trace_level == "summary":
        return None
    return np.asarray(np.nansum(np.asarray(reader.kv_cube(metric), np.float64), (1, 2)))


def tracks_in(folder: Path) -> list[Track]:
    """Return the tracks of all runs of a folder that were compared with full KV, its own left out."""
    tracks = []
    for uid in list_runs(folder)["uid"]:
        try:
            with TraceReader.open(folder, str(uid)) as reader:
                if len(reader.loss()) and reader.meta.method != methods.REFERENCE:
                    tracks.append(track_of(reader))
        except TraceError:
            continue
    return [track for track in tracks if track]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    table = foresight(tracks_in(runs_folder(options.runs)))
    for row in table:
        print(json.dumps(row))
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

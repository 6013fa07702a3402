"""UMAP of a run's span keys, in a process of its own: `python -m kvlens.app.data.spanmap RUNS UID LAYER KV_HEAD
NEIGHBORS OUT`.

Prints a JSON object per phase, the last one 'done' or 'error', and writes the map to OUT in one move. umap-learn is
imported here and nowhere else: it takes seconds, and its compiler has no place in the server's process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.files import make_folder, write_file
from kvlens.store.reader import TraceError, TraceReader

SEED, MIN_DIST = 0, 0.1
LEAST_SPANS = 15
"""below this UMAP's picture says more of its own random start than of the spans"""

INTERPRETED = 100
"""up to so many spans UMAP's code runs as Python, which is done before its compiler is: 80 spans take 9 s of a core;
compiled, 13 s where the compiler has kept parts from before, 32 s where not (AMD EPYC, umap-learn 0.5.12)"""


def settings(layer: int, kv_head: int, neighbors: int) -> dict[str, Any]:
    """What decides a map, besides the run."""
    return {
        "layer": layer,
        "kv_head": kv_head,
        "neighbors": neighbors,
        "min_dist": MIN_DIST,
        "metric": "euclidean",
        "seed": SEED,
    }


def say(**report: Any) -> None:
    print(json.dumps(report), flush=True)


def fit(keys: np.ndarray, neighbors: int) -> np.ndarray:
    """keys [S, D] -> points [S, 2]. One thread, since only that is repeatable."""
    if len(keys) <= INTERPRETED:
        os.environ["NUMBA_DISABLE_JIT"] = "1"  # read when the compiler is imported, which nothing here has done before
    from umap import UMAP

    say(phase="fit")
    # With few points the spectral start asks its solver for nearly all eigenvectors, which it refuses; PCA serves as
    # well.
    mapper = UMAP(n_neighbors=neighbors, min_dist=MIN_DIST, metric="euclidean", random_state=SEED, n_jobs=1, init="pca")
    return np.asarray(mapper.fit_transform(keys), np.float64)


def make(runs: Path, uid: str, layer: int, kv_head: int, neighbors: int, out: Path) -> None:
    """Reads the keys, maps them, stores the map. Raises ValueError or TraceError with one sentence."""
    say(phase="load")
    with TraceReader.open(runs, uid) as reader:
        results = reader.span_keys(layer, kv_head)
    if results is None:
        raise ValueError(f"Run {uid} recorded no span keys for layer {layer}, KV head {kv_head}.")
    spans, keys, form = results
    if len(spans) < LEAST_SPANS:
        raise ValueError(f"Run {uid} has {len(spans)} spans with keys; UMAP needs at least {LEAST_SPANS}.")
    if not 2 <= neighbors < len(spans):
        raise ValueError(f"{neighbors} neighbours cannot be had of {len(spans)} spans; ask for 2 to {len(spans) - 1}.")
    say(phase="import")
    points = fit(keys, neighbors)
    if not np.isfinite(points).all():
        raise ValueError("UMAP gave points that are not finite numbers.")
    text = json.dumps(
        {**settings(layer, kv_head, neighbors), "form": form, "spans": spans.tolist(), "points": points.tolist()}
    )
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    make_folder(out.parent)
    try:
        write_file(temporary, text.encode())
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    runs, uid, layer, kv_head, neighbors, out = arguments
    try:
        make(Path(runs), uid, int(layer), int(kv_head), int(neighbors), Path(out))
    except (ValueError, TraceError, OSError, ImportError) as error:
        say(phase="error", message=" ".join(str(error).split()))
        return 1
    say(phase="done", uid=uid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

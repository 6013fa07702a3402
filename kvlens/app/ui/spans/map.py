"""The Spans page: the keys of the spans as points of a plane, by PCA at once and by UMAP when its process is done."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.data.spanmap import LEAST_SPANS, MIN_DIST, SEED, settings
from kvlens.app.figures.projection import pca, projection_figure
from kvlens.app.ui.common import data, sentences, widgets
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.jobs import Job, JobManager
from kvlens.app.ui.spans.data import COLOURS, View
from kvlens.app.ui.spans.view import span_clicked
from kvlens.files import cache_dir, read_plain
from kvlens.instruments import MOST_KEY_BYTES, span_key_bytes
from kvlens.text.units import si_bytes

NEIGHBORS = (5, 15, 30, 50)
KINDS = {"pca": "PCA", "umap": "UMAP"}
_PHASES = {"load": "reading the keys", "import": "loading umap-learn, which takes seconds", "fit": "placing the points"}


class Maps:
    """The UMAP jobs of this server, at most one per map; they belong to the server, not to a browser session."""

    def __init__(self) -> None:
        self._jobs, self._ids, self._lock = JobManager(), dict[Path, str](), threading.Lock()

    def job(self, out: Path) -> Job | None:
        """The newest job that makes the map `out`."""
        with self._lock:
            return self._jobs.get(self._ids.get(out, ""))

    def start(self, out: Path, uid: str, layer: int, kv_head: int, neighbors: int) -> None:
        """Begins to make the map, unless that is under way."""
        with self._lock:
            job = self._jobs.get(self._ids.get(out, ""))
            if job is None or not job.active:
                numbers = (str(number) for number in (layer, kv_head, neighbors))
                argv = [
                    sys.executable,
                    "-m",
                    "kvlens.app.data.spanmap",
                    str(data.runs_dir().resolve()),
                    uid,
                    *numbers,
                    str(out),
                ]
                self._ids[out] = self._jobs.submit(argv, f"UMAP of run {uid}")

    def shutdown(self) -> None:
        self._jobs.shutdown()


@st.cache_resource(show_spinner=False, on_release=Maps.shutdown)
def maps() -> Maps:
    """One for the server process, shared by all sessions."""
    return Maps()


def map_file(uid: str, layer: int, kv_head: int, neighbors: int) -> Path:
    """Where a map is kept: beside the run's trace, or in the user's cache where that may not be written."""
    run = (data.runs_dir() / uid).resolve()
    folder = run / "maps" if os.access(run, os.W_OK) else cache_dir() / "maps" / uid
    return folder / f"umap-l{layer}-kv{kv_head}-n{neighbors}-d{MIN_DIST:g}-s{SEED}.json"


def load_map(path: Path, spans: np.ndarray, expected: dict[str, object]) -> np.ndarray | None:
    """The points [S, 2] of a stored map of exactly these spans and settings; None when there is none, or it is not
    one."""
    try:
        stored = json.loads(read_plain(path).decode("utf-8"))
        same = stored["spans"] == spans.tolist() and all(stored[name] == value for name, value in expected.items())
        points = np.asarray(stored["points"], np.float64)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return points if same and points.shape == (len(spans), 2) and np.isfinite(points).all() else None


def why_no_keys(reader: TraceReader) -> str:
    """Return why a run has no keys of its spans."""
    meta, spans = reader.meta, reader.spans()
    count = int((spans["born_step"] < 0).sum())
    needed = span_key_bytes(meta.layers, meta.kv_heads, count, meta.head_dim or 0)
    if needed > MOST_KEY_BYTES:
        return (
            f"The keys of this run's {count:,} spans would take {si_bytes(needed)}. A trace holds "
            f"{si_bytes(MOST_KEY_BYTES)} of them at most, so none were recorded."
        )
    return sentences.NO_SPAN_KEYS


def key_map(reader: TraceReader, view: View) -> dict[str, str]:
    """Choice of the map, the map, and what it means; returns URL parameters."""
    st.markdown("##### Keys of the spans")
    layer, head = view.chosen.layer or 0, view.chosen.head or 0
    kv_head = head // (reader.q_heads // reader.kv_heads)
    span_keys = reader.span_keys(layer, kv_head)
    if span_keys is None:
        st.info(why_no_keys(reader))
        return {}
    spans, keys, form = span_keys
    few = len(spans) < LEAST_SPANS
    kind, neighbors = ("pca", NEIGHBORS[0]) if few else _choice(len(spans))
    points, shares = pca(keys)
    axes = tuple(f"principal component {k + 1} ({share:.0%} of the variance)" for k, share in enumerate(shares))
    umap_points = None if kind == "pca" else _umap(reader, layer, kv_head, neighbors, spans)
    if umap_points is not None:
        points, axes = umap_points, ("UMAP 1 (no unit)", "UMAP 2 (no unit)")
    name = "UMAP" if umap_points is not None else "PCA"
    place = pd.DataFrame({"span": spans, "x": points[:, 0], "y": points[:, 1]}).merge(view.table, on="span")
    key = f"span_map_{name}"
    star = view.table.loc[view.table["needle"], "span"].tolist()
    chart(
        projection_figure(
            place,
            (axes[0], axes[1]),
            view.column,
            COLOURS[view.column],
            view.selected,
            f"{name} of mean span keys, L{layer} KV{kv_head}",
            star,
            name == "PCA",
        ),
        place.drop(columns=["text", "reason"]),
        f"{reader.uid}-span-keys-{name.lower()}-l{layer}-kv{kv_head}",
        key,
        f"{name} of the spans' mean keys",
        on_select=lambda: span_clicked(key),
    )
    st.caption(_meaning(form, name, len(spans), few, len(place), neighbors))
    return {} if kind == "pca" else {"proj": kind, "neighbors": str(neighbors)}


def _choice(spans: int) -> tuple[str, int]:
    """PCA or UMAP, and how many neighbours UMAP looks at."""
    left_column, right = st.columns([2, 3], vertical_alignment="bottom")
    state, able = st.session_state, [number for number in NEIGHBORS if number < spans]
    if "spans_map" not in state:
        projection = st.query_params.get("proj", "pca")
        state["spans_map"] = projection if projection in KINDS else "pca"
    if state.get("spans_neighbors") not in able:
        neighbors_text = st.query_params.get("neighbors", "")
        state["spans_neighbors"] = (
            int(neighbors_text) if neighbors_text in map(str, able) else able[min(1, len(able) - 1)]
        )
    kind = left_column.segmented_control(
        "Map",
        list(KINDS),
        key="spans_map",
        format_func=lambda name: KINDS[name],
        persist_state="session",
        required=True,
    )
    neighbors = right.selectbox(
        "Neighbours (UMAP)", able, key="spans_neighbors", disabled=kind != "umap", persist_state="session"
    )
    return str(kind or "pca"), int(neighbors)


def _umap(reader: TraceReader, layer: int, kv_head: int, neighbors: int, spans: np.ndarray) -> np.ndarray | None:
    """The stored map; when there is none its process is started, and its progress or failure is said."""
    out = map_file(reader.uid, layer, kv_head, neighbors)
    points = load_map(out, spans, settings(layer, kv_head, neighbors))
    if points is not None:
        return points
    job = maps().job(out)
    if job is None or job.state == "done":
        maps().start(out, reader.uid, layer, kv_head, neighbors)
        job = maps().job(out)
    if job is not None and job.active:
        st.fragment(_wait, run_every=0.5)(job)
    elif job is not None and job.state == "failed":
        widgets.error(f"UMAP failed, PCA is shown: {job.message or 'its process gave no reason.'}", job.log)
        st.button("Try UMAP again", on_click=maps().start, args=(out, reader.uid, layer, kv_head, neighbors))
    return None


def _wait(job: Job) -> None:
    """Where the process is; the page is drawn anew when it ends."""
    if not job.active:
        st.rerun()
    waited = time.time() - (job.started or job.created)
    phase = "waiting for another map" if job.state == "queued" else _PHASES.get(job.phase, "starting")
    st.info(
        f"UMAP is being computed in a process of its own: {phase}, {waited:.0f} s. Until then PCA is shown.",
        icon=":material/hourglass_top:",
    )


def _meaning(form: str, name: str, spans: int, few: bool, drawn: int, neighbors: int) -> str:
    """What the points are, and what they are not."""
    turned = {
        "pre-rope": "before the rotary embedding (pre-RoPE), so that position has no effect",
        "post-rope": "as the cache holds them (post-RoPE), so that position has an effect",
    }
    text = (
        f"One point per prompt span: the mean of its tokens' keys, {turned.get(form, plain_form(form))}. "
        f"The star holds the needle. "
    )
    if few:
        text += f"{spans} spans are too few for UMAP (at least {LEAST_SPANS}), so there is PCA alone. "
    text += (
        f"{sentences.PCA_DISTANCES} "
        if name == "PCA"
        else (
            f"A distance in UMAP is neither attention nor a distance of keys. UMAP preserves each point's {neighbors} "
            f"nearest neighbours (Euclidean, min_dist {MIN_DIST:g}, seed {SEED}). "
        )
    )
    return text + (f"{spans - drawn} spans that no longer exist at this step are not drawn." if drawn < spans else "")


def plain_form(form: str) -> str:
    """A form this version does not know, as it is stored."""
    return widgets.plain(f"in the form '{form}'")

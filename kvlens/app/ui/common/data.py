"""Cached access to runs. Finished runs are immutable, so a run is known by its folder and the time its trace was last
changed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.figures.metrics import METRICS, metric_of
from kvlens.app.ui.common.pagereader import PageReader, shown_frame
from kvlens.app.ui.common.player import payload
from kvlens.app.ui.common.player.lens import worst_regret
from kvlens.app.ui.common.state import Selection, clamp
from kvlens.lens.verdict import Verdict, verdict
from kvlens.models import catalogue as catalogued
from kvlens.models.find import default_model
from kvlens.store.reader import TraceError, TraceReader, list_runs

#: The metric a page opens with: the first of these that the run recorded.
PREFERRED = ("zoom_rate", "n_zoomed", "coverage", "mass_resident", "mass_window", "entropy")


LATELY_S = 5.0


def _uid(reader: TraceReader) -> str:
    return reader.uid


def runs_dir() -> Path:
    """Folder of all runs: KVLENS_RUNS, or 'runs' in the working directory."""
    return Path(os.environ.get("KVLENS_RUNS", "runs"))


def runs() -> pd.DataFrame:
    """All runs, newest first. Read anew: these are small files, and runs come and go."""
    began, folder = time.monotonic(), runs_dir()
    table = shown_frame(list_runs(folder))
    _lately()[str(folder)] = began, table
    return table.copy(deep=False)


@st.cache_resource(show_spinner=False)
def _lately() -> dict[str, tuple[float, pd.DataFrame]]:
    """Folder -> when its runs were last listed, and the list."""
    return {}


def runs_lately() -> pd.DataFrame:
    """The runs as they were at most five seconds ago: for parts of a page that are drawn at every move of the player,
    or after the page itself has looked."""
    listed, table = _lately().get(str(runs_dir()), (-LATELY_S, None))
    return runs() if table is None or time.monotonic() - listed > LATELY_S else table.copy(deep=False)


def forget_runs() -> None:
    """A run has ended: what `runs_lately` knows is old."""
    _lately().clear()


@st.cache_data(show_spinner=False)
def catalogue() -> list[dict[str, Any]]:
    """The methods with their parameters and presets, family by family."""
    return methods.catalogue()


def titles() -> dict[str, str]:
    """Method -> title, of the methods installed here."""
    return {entry["name"]: entry["title"] for entry in catalogue()}


def keeps_all(name: str) -> bool:
    """The method keeps every token on the device by design; False of one that is not installed here."""
    return any(entry["keeps_all"] for entry in catalogue() if entry["name"] == name)


def models() -> list[str]:
    """Models to offer: those that have a name here, the default one first, then those of earlier runs."""
    known = catalogued.names()
    first = default_model()
    used = [str(name) for name in runs()["model"].dropna().unique() if name != "synthetic"]
    return list(dict.fromkeys([first, *known[:-1], *used, known[-1]]))


def stamp(uid: str) -> int:
    """When the trace was last changed, ns; 0 when there is none, in which case opening it says what is wrong."""
    try:
        return (runs_dir() / uid / "trace.duckdb").stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


@st.cache_resource(max_entries=12, show_spinner=False)
def _open(folder: str, uid: str, changed: int) -> TraceReader:
    return PageReader.open(Path(folder), uid)


def open_run(uid: str) -> TraceReader:
    """A reader, shared by all sessions; raises TraceError with the sentence to show."""
    reader = _open(str(runs_dir()), uid, stamp(uid))
    if not reader.n_steps and reader.status == "completed":
        raise TraceError(f"Run {uid} holds no decode step; run it again with at least one new token.")
    return reader


def metrics(reader: TraceReader) -> list[str]:
    """Metrics recorded per step and head, in the order of METRICS."""
    names = payload.per_step_metrics(reader)
    return sorted(names, key=lambda name: list(METRICS).index(name) if name in METRICS else len(METRICS))


def summary_metrics(reader: TraceReader) -> list[str]:
    """Metrics that can be summed up per head: also those of runs that keep no figures per step."""
    return metrics(reader) or reader.metrics()


def opening_metric(names: list[str]) -> str | None:
    """The metric shown when none was chosen."""
    return next((name for name in PREFERRED if name in names), names[0] if names else None)


def fit(reader: TraceReader, chosen: Selection) -> tuple[Selection, list[str]]:
    """The selection inside this run, with what had to be changed."""
    names = metrics(reader)
    return clamp(
        chosen, reader, names, {int(span) for span in reader.spans()["span"]}, opening(reader, names, chosen.metric)
    )


def opening(reader: TraceReader, names: list[str], wanted: str | None) -> Selection:
    """What a run is opened with: the step of loss, with the head and the span that were missed most there; of a run
    that lost nothing, the step, head and span of most regret; else step 0 and the head with the most of the metric.
    `wanted`: the metric that was asked for."""
    found = loss_verdict(reader)
    if found is None and (place := held_place(reader)) is not None:
        return replace(place, metric="regret" if "regret" in names else opening_metric(names))
    if found is None and wanted is None and "regret" in names and (worst := worst_regret(reader)) is not None:
        return Selection(None, worst["step"], worst["layer"], worst["head"], worst["span"], "regret")
    if found is None:
        metric = wanted if wanted in names else opening_metric(names)
        return Selection(None, 0, *opening_head(reader, stamp(reader.uid), metric), None, opening_metric(names))
    metric = "regret" if "regret" in names else opening_metric(names)
    if (missed := found.missed) is None:
        return Selection(None, found.step, *opening_head(reader, stamp(reader.uid), metric), None, metric)
    return Selection(None, found.step, missed.layer, missed.q_head, missed.span, metric)


def held_place(reader: TraceReader) -> Selection | None:
    """Where to look at a run that a span was held or dropped in: the step at which the run it repeats was lost (or the
    one that a drop changed most), that span, and the query head that full attention sends there most. None for other
    runs."""
    holds, tried = (*reader.meta.hold, *reader.meta.drop), reader.meta.whatif
    if not holds or tried is None or (step := tried.step) is None or step >= reader.n_steps:
        return None
    heads = reader.oracle_step(step)
    heads = heads[heads["span"] == holds[0].span]
    if heads.empty:
        layer, kv_head = holds[0].heads[0]
        return Selection(None, step, layer, kv_head * (reader.q_heads // reader.kv_heads), holds[0].span)
    most = heads.iloc[int(heads["full"].argmax())]
    return Selection(None, step, int(most["layer"]), int(most["q_head"]), holds[0].span)


def loss_verdict(reader: TraceReader) -> Verdict | None:
    """The verdict on a run, found once."""
    return _verdict(reader, reader.uid, stamp(reader.uid))


@st.cache_data(max_entries=64, show_spinner=False)
def _verdict(_reader: TraceReader, uid: str, changed: int) -> Verdict | None:
    return verdict(_reader)


@st.cache_data(max_entries=64, show_spinner=False, hash_funcs={TraceReader: _uid, PageReader: _uid})
def opening_head(reader: TraceReader, changed: int, metric: str | None) -> tuple[int, int]:
    """The (layer, query head) with the largest mean of a metric: where there is most to see."""
    if metric is None or metric_of(metric).level != "q":
        return 0, 0
    means = reader.head_summary(metric)
    if not np.isfinite(means).any():
        return 0, 0
    layer, head = np.unravel_index(int(np.nanargmax(means)), means.shape)
    return int(layer), int(head)


@st.cache_data(max_entries=4, show_spinner="Reading the trace…")
def _run_payload(_reader: TraceReader, identity: str, names: list[str], loaded: list[str]) -> bytes:
    return payload.run_payload(_reader, identity, names, loaded, loss_verdict(_reader))


@st.cache_data(max_entries=64, show_spinner=False)
def _slice_payload(_reader: TraceReader, identity: str, chosen: Selection, revision: int) -> bytes:
    return payload.slice_payload(_reader, identity, chosen, revision)


def player_payloads(reader: TraceReader, chosen: Selection, revision: int) -> tuple[bytes, bytes]:
    """The run's payload and the selected head's slice."""
    names = metrics(reader)
    loaded = payload.loaded_metrics(reader, names, chosen.metric)
    identity = payload.payload_id(reader.uid, stamp(reader.uid), loaded)
    return _run_payload(reader, identity, names, loaded), _slice_payload(reader, identity, chosen, revision)

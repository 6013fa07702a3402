"""Cached access to runs. Finished runs are immutable, so a run is known by its folder and the time its trace was last
changed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.ui.common.pagereader import PageReader, shown_frame
from kvlens.app.ui.common.state import Selection, clamp
from kvlens.lens.verdict import Verdict, verdict
from kvlens.methods.naming import installed, preset_name, recorded_stand_in, titled
from kvlens.models import catalogue as catalogued
from kvlens.models.find import default_model
from kvlens.player import payload
from kvlens.player.opening import Place
from kvlens.player.opening import opening as place_to_open
from kvlens.runs.request import default_preset
from kvlens.store.reader import TraceError, TraceReader, list_runs
from kvlens.store.reader import stamp as stored_stamp

LATELY_S = 5.0


def runs_dir() -> Path:
    """Folder of all runs: KVLENS_RUNS, or 'runs' in the working directory."""
    return Path(os.environ.get("KVLENS_RUNS", "runs"))


def runs() -> pd.DataFrame:
    """All runs, newest first. Read anew: these are small files, and runs come and go."""
    start_time, folder = time.monotonic(), runs_dir()
    table = shown_frame(list_runs(folder))
    _lately()[str(folder)] = start_time, table
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


def method_title(name: str) -> str:
    """Return a method's title, also of a composed one; its name if it is not installed here."""
    method = installed(name)
    return name if method is None else method.title


def titles_on(model: str | None) -> dict[str, str]:
    """Method -> what it is called on a model with its usual preset, its untrained parts included. None: as `titles`."""
    names = titles()
    return names if model is None else {name: preset_name(name, default_preset(name, model)) for name in names}


def row_title(row: Mapping[Any, Any]) -> str:
    """What the method of a listed run is called, of a row of `runs`; '' where the run does not record its method."""
    method = row.get("method")
    return titled(method_title(method), recorded_stand_in(row)) if isinstance(method, str) else ""


def keeps_all(name: str) -> bool:
    """The method keeps every token on the device by design; False of one that is not installed here."""
    method = installed(name)
    return method is not None and method.keeps_all


def models() -> list[str]:
    """Models to offer: those that have a name here, the default one first, then those of earlier runs."""
    names = catalogued.names()
    default = default_model()
    used = [str(name) for name in runs()["model"].dropna().unique() if name != "synthetic"]
    return list(dict.fromkeys([default, *names[:-1], *used, names[-1]]))


def stamp(uid: str) -> int:
    """When the trace was last changed, ns; 0 when there is none. What is kept of a reader has the reader's own stamp as
    its key: the trace may have been replaced since."""
    return stored_stamp(runs_dir(), uid)


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
    return payload.ordered_metrics(reader)


def summary_metrics(reader: TraceReader) -> list[str]:
    """Metrics that can be summed up per head: also those of runs that keep no figures per step."""
    return metrics(reader) or reader.metrics()


def fit(reader: TraceReader, selection: Selection) -> tuple[Selection, list[str]]:
    """The selection inside this run, with what had to be changed."""
    names = metrics(reader)
    return clamp(
        selection,
        reader,
        names,
        {int(span) for span in reader.spans()["span"]},
        opening(reader, names, selection.metric),
    )


def opening(reader: TraceReader, names: list[str], requested_metric: str | None) -> Selection:
    """Return what a page opens a run with. `names`: its metrics. `requested_metric`: the user's choice of metric."""
    place = _opening(reader, reader.uid, reader.stamp, names, requested_metric)
    return Selection(None, place.step, place.layer, place.head, place.span, place.metric)


@st.cache_data(max_entries=64, show_spinner=False)
def _opening(_reader: TraceReader, uid: str, changed: int, names: list[str], requested_metric: str | None) -> Place:
    return place_to_open(_reader, names, loss_verdict(_reader), requested_metric)


def loss_verdict(reader: TraceReader) -> Verdict | None:
    """The verdict on a run, found once."""
    return _verdict(reader, reader.uid, reader.stamp)


@st.cache_data(max_entries=64, show_spinner=False)
def _verdict(_reader: TraceReader, uid: str, changed: int) -> Verdict | None:
    return verdict(_reader)


@st.cache_data(max_entries=4, show_spinner="Reading the trace…")
def _run_payload(_reader: TraceReader, identity: str, names: list[str], loaded: list[str]) -> bytes:
    return payload.run_payload(_reader, identity, names, loaded, loss_verdict(_reader))


@st.cache_data(max_entries=64, show_spinner=False)
def _slice_payload(_reader: TraceReader, identity: str, place: Place, revision: int) -> bytes:
    return payload.slice_payload(_reader, identity, place, revision)


def player_payloads(reader: TraceReader, selection: Selection, revision: int) -> tuple[bytes, bytes]:
    """The run's payload and the selected head's slice."""
    names = metrics(reader)
    loaded = payload.loaded_metrics(reader, names, selection.metric)
    identity = payload.payload_id(reader.uid, reader.stamp, loaded)
    place = Place(selection.step or 0, selection.layer or 0, selection.head or 0, selection.span, selection.metric)
    return _run_payload(reader, identity, names, loaded), _slice_payload(reader, identity, place, revision)

"""What a method noted of its own decisions: the list of names, and the chosen one drawn."""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.journal import curves, vector_map
from kvlens.app.ui.common.parts import about, download, draw
from kvlens.app.ui.common.widgets import plain
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import visible


def journal(reader: TraceReader) -> None:
    """Table of all names with their meaning, the chosen one as curves or a map, and its numbers for download."""
    st.markdown("##### What the method noted")
    names = reader.journal_names()
    if not names:
        st.info("This run's method noted nothing of its decisions.")
        return
    meaning_by_name = meanings(reader)
    table = listing(reader.journal(), meaning_by_name)
    st.dataframe(table, hide_index=True, width="stretch")
    download(table, f"{reader.uid}-journal-names")
    name = str(st.selectbox("Show", names, key=f"journal_name_{reader.uid}"))
    st.text(visible(f"{name}: {meaning_by_name.get(name, 'the method does not say what it means')}"))
    plot(reader, name)


def meanings(reader: TraceReader) -> dict[str, str]:
    """What each name means, as far as the method says so."""
    entry = about(reader)
    return dict(entry.get("journal_names") or {}) if entry else {}


def listing(frame: pd.DataFrame, meaning_by_name: dict[str, str]) -> pd.DataFrame:
    """One row per name: name, meaning, where it was noted, how many vectors of what length."""
    rows = []
    for name, part in frame.groupby("name", sort=True):
        lengths = [len(values) for values in part["values"]]
        low, high = min(lengths), max(lengths)
        places = [word for word, column in (("layer", "layer"), ("KV head", "kv_head")) if part[column].notna().any()]
        first_step, last = int(part["step"].min()), int(part["step"].max())
        steps = (
            "end of prefill"
            if last < 0
            else f"step {first_step}"
            if first_step == last
            else f"steps {max(first_step, 0)}–{last}"
        )
        steps += " and end of prefill" if first_step < 0 <= last else ""
        rows.append(
            {
                "name": name,
                "meaning": meaning_by_name.get(str(name), "not described"),
                "noted": " per ".join([steps, *places]),
                "vectors": len(part),
                "length": str(low) if low == high else f"{low}–{high}",
            }
        )
    return pd.DataFrame(rows)


def plot(reader: TraceReader, name: str) -> None:
    """One name of the journal: numbers as curves, vectors as a map, over steps or, where noted once, over layers."""
    frame = reader.journal(name)
    if frame.empty:
        st.info(plain(f"{name} was not recorded in this run."))
        return
    once = frame["step"].nunique() == 1
    if max(len(values) for values in frame["values"]) <= 1:
        figure = _numbers(frame, name, once)
    else:
        figure = _vectors(_narrowed(frame, name, once), name, once)
    draw(reader, figure, key=f"journal_{name}", alt=f"{name} as the method noted it", data=lambda: long(frame))


def long(frame: pd.DataFrame) -> pd.DataFrame:
    """A journal with one row per number: step, layer, kv_head, name, index, value."""
    lengths = frame["values"].map(len).to_numpy(np.int64)
    keys = frame.loc[frame.index.repeat(lengths), ["step", "layer", "kv_head", "name"]].reset_index(drop=True)
    index = np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else np.empty(0, np.int64)
    values = np.concatenate(list(frame["values"])) if len(lengths) else np.empty(0, np.float32)
    return keys.assign(index=index, value=values)


def _numbers(frame: pd.DataFrame, name: str, once: bool) -> object:
    """Curves over steps, one per layer and KV head; noted once, over layers, one per KV head."""
    frame = frame.assign(value=[float(values[0]) if len(values) else np.nan for values in frame["values"]])
    over_layers = once and frame["layer"].notna().all()
    keys = ["kv_head"] if over_layers else ["layer", "kv_head"]
    x = "layer" if over_layers else "step"
    series = {}
    for place, part in frame.groupby(keys, dropna=False, sort=True):
        part = part.sort_values(x)
        series[_label(dict(zip(keys, cast("tuple[float, ...]", place), strict=True)))] = (
            part[x].tolist(),
            part["value"].tolist(),
        )
    return curves(series, name, "layer" if over_layers else "decode step")


def _label(place: dict[str, float]) -> str:
    marks = {"layer": "L", "kv_head": "KV"}
    return " ".join(f"{marks[key]}{int(value)}" for key, value in place.items() if not pd.isna(value))


def _narrowed(frame: pd.DataFrame, name: str, once: bool) -> pd.DataFrame:
    """The vectors of one layer and KV head, as far as a map has room for one only."""
    for key, title in (("layer", "Layer"), ("kv_head", "KV head")):
        numbers = sorted(int(value) for value in frame[key].dropna().unique())
        if not numbers or (key == "layer" and once):
            continue
        value = st.selectbox(title, numbers, key=f"journal_{key}_{name}") if len(numbers) > 1 else numbers[0]
        frame = frame[(frame[key] == value) | frame[key].isna()]
    return frame


def _vectors(frame: pd.DataFrame, name: str, once: bool) -> object:
    axis = "layer" if once and frame["layer"].notna().all() else "step"
    frame = frame.sort_values(axis, kind="stable")
    return vector_map(list(frame["values"]), [int(value) for value in frame[axis]], name, axis)

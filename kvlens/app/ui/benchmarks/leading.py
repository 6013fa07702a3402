"""The first picture of the Benchmarks page: right answers against bytes, a line per method, its condition above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.quality import table
from kvlens.app.figures.qualitycost import cost_rows, quality_cost
from kvlens.app.ui.benchmarks import benchview, result_files
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import plain
from kvlens.lab.bench.joined import SAME
from kvlens.lab.bench.qualitypage import ORDER
from kvlens.lens.condition import count_words
from kvlens.models import catalogue


def show_leading(model: str | None) -> None:
    """Draw the picture of the model's quality table that is chosen below, else of its first; nothing without one. Other
    tables on the same prompts add the methods and budgets that it lacks."""
    results = [result for result in result_files.files("quality")[0] if result.model == model]
    name = st.session_state.get("bench_table")
    try:
        tables = sorted(benchview.joined(results), key=result_files.sort_key)
        result = next((each for each in tables if each.name == name), tables[0] if tables else None)
        if result is None:
            return
        request = result.content["about"]["request"]
        rows = pd.concat([_rows(result), *_others(result, tables)], ignore_index=True)
        rows = rows.drop_duplicates(["method", "budget"], ignore_index=True)
        if rows.empty:
            return
        words = condition(request, [int(n) for n in rows["n"]])
    except (KeyError, TypeError):
        return  # the quality table below says what is wrong with the file
    st.markdown("##### Right answers against bytes")
    st.markdown(plain(words))
    st.vega_lite_chart(rows, quality_cost(rows), key="bench_leading")
    st.caption(
        "Point at a line: its name and its 95 % intervals; the others are dimmed. One point per budget. "
        "Right of 100 %: methods that keep every token and save reading."
    )
    download(rows, "kvlens-quality-bytes")


def _rows(result: result_files.ResultFile) -> pd.DataFrame:
    """Points of one table."""
    about = result.content["about"]
    request = about["request"]
    frame = table(result.content["lines"], request["model"], request["length"], about.get("presets", {}))
    return cost_rows(frame, result_files.titles_measured(request["model"], about))


def _others(result: result_files.ResultFile, tables: Sequence[result_files.ResultFile]) -> Iterator[pd.DataFrame]:
    """Yield the points of each other table whose prompts are those of `result`; the tables below say what is wrong with
    one that lacks something."""
    for each in tables:
        with suppress(KeyError, TypeError):
            if each is not result and _prompts(each) == _prompts(result):
                yield _rows(each)


def _prompts(result: result_files.ResultFile) -> list[Any]:
    """Return what decides a table's prompts and the room of their answers."""
    about = result.content["about"]
    return [*(about["request"].get(name) for name in SAME), about.get("depths"), about.get("new_tokens")]


def condition(request: dict[str, Any], counts: Sequence[int]) -> str:
    """Return the line above the picture: model, length, tasks, whether the question is known, n. counts: prompts of
    each point, at least one."""
    parts = (
        catalogue.label(request["model"]),
        f"prompts of {request['length']:,} tokens",
        ", ".join(request["tasks"]),
        ORDER[request.get("question", "in")],
        f"{count_words(counts)} prompts a point",
    )
    return " · ".join(parts)

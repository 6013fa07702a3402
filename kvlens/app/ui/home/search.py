"""Which runs of the list are shown: fields above the table, all of them in the address."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data
from kvlens.lens.listing import Search
from kvlens.lens.severity import KINDS
from kvlens.models.find import short_model

TEXT, METHOD, MODEL, OUTCOME, TAG, BY_PROMPT = "find", "method", "model", "outcome", "tag", "by_prompt"
"""keys of the fields, and their names in the address"""


def search(table: pd.DataFrame) -> tuple[Search, bool]:
    """Draws the fields; what is looked for, and whether runs are grouped by prompt."""
    tags = list(dict.fromkeys(tag for source in table["tags"] for tag in source))
    fields = st.columns([5, 3, 3, 3, *([3] if tags else []), 3], vertical_alignment="bottom")
    text = fields[0].text_input(
        "Find",
        key=TEXT,
        bind="query-params",
        placeholder="Words of the prompt, answer, output, name, note",
        icon=":material/search:",
        label_visibility="collapsed",
    )
    means = "; ".join(f"**{kind}**: {words}" for kind, words in KINDS.items())
    methods = {data.method_title(name): name for name in table["method"].dropna().unique()}
    _named_by_code(methods)
    models = [short_model(str(model)) for model in table["model"].dropna()]
    rows = [
        _draw_filter(column, key, label, options, sentence)
        for column, key, label, options, sentence in (
            (fields[1], METHOD, "Any method", sorted(methods), None),
            (fields[2], MODEL, "Any model", list(dict.fromkeys(models)), None),
            (fields[3], OUTCOME, "Any outcome", list(KINDS), means),
            *([(fields[4], TAG, "Any tag", tags, None)] if tags else []),
        )
    ]
    grouped = fields[-1].toggle("Group by prompt", key=BY_PROMPT, bind="query-params")
    method, model, outcome, tag = (*rows, None)[:4]
    return Search(text or "", method and methods.get(method), model, outcome, tag), bool(grouped)


def _named_by_code(methods: Mapping[str, str]) -> None:
    """A link may name the method as the command line does. The field writes its title into the address and takes
    nothing else from there. methods: title -> name."""
    titles = {name: title for title, name in methods.items()}
    source = titles.get(st.query_params.get(METHOD, ""))
    if source is not None and METHOD not in st.session_state:
        st.session_state[METHOD] = source


def clear() -> None:
    """All runs again; how they are grouped stays."""
    st.session_state[TEXT] = ""
    for key in (METHOD, MODEL, OUTCOME, TAG):
        st.session_state[key] = None


def _draw_filter(
    column: st.delta_generator.DeltaGenerator, key: str, label: str, options: list[str], means: str | None
) -> str | None:
    results = column.selectbox(
        label,
        options,
        index=None,
        key=key,
        bind="query-params",
        placeholder=label,
        help=means,
        label_visibility="collapsed",
    )
    return None if results is None else str(results)

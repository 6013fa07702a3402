"""The Compare page's tables of all runs: what is set differently, what each came to."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.compare.readbound import weights_share
from kvlens.app.compare.settings import ABSENT, KINDS, config_difference, setting_words
from kvlens.app.compare.together import joined
from kvlens.app.compare.totals import Total, totals, totals_table
from kvlens.app.figures.phases import by_run
from kvlens.app.ui.common.chart import chart, menu
from kvlens.app.ui.common.pagereader import shown_frame
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.compare.pick import Compared
from kvlens.store.reader import TraceReader
from kvlens.tables.latency import phase_means
from kvlens.text.units import counted

MOST, HEIGHT, SAID = 9, 300, 100
"""rows of the table of settings that stand at their full height; pixels of one with more; characters of a heading"""


def differences(compared: Compared) -> None:
    """What differs is named in the heading of a fold; in it the settings, parameters of some methods alone, the
    circumstances and what is the same."""
    names = list(compared.runs)
    table = shown_frame(config_difference(compared.runs))
    worded = table.assign(setting=table["setting"].map(setting_words))
    parts = {kind: worded.loc[worded["kind"] == kind].drop(columns="kind") for kind in KINDS}
    shown, same = parts["differs"], parts["same"]
    sentence = ", ".join(name.removeprefix("parameter ") for name in shown["setting"]) or "nothing"
    total = "one method" if len(names) == 2 else "some methods"
    titles = {
        f"{counted(len(shown), 'setting')} that differ": shown,
        f"{counted(len(parts['some methods only']), 'parameter')} of {total} only": parts["some methods only"],
        f"{len(parts['circumstances'])} circumstances that differ": parts["circumstances"],
        f"{len(same)} the same": same[["setting", names[0]]].rename(columns={names[0]: "all runs"}),
    }
    titles = {title: part for title, part in titles.items() if len(part)}
    with st.expander(
        plain(f"Set differently: {sentence if len(sentence) <= SAID else sentence[:SAID].rstrip(', ') + '…'}")
    ):
        for tab, part in zip(st.tabs(list(titles)), titles.values(), strict=True):
            tab.dataframe(part, hide_index=True, width="stretch", height="content" if len(part) <= MOST else HEIGHT)
        if (shown[names] == ABSENT).to_numpy().any():
            st.caption(f"{ABSENT}: the run has no such setting.")
        menu(table, f"{compared.stem}-settings", "compare_settings", image=False)


_WIDE = {"quantity": st.column_config.TextColumn(width=290), "B beside A": st.column_config.TextColumn(width="medium")}


def sums(compared: Compared) -> None:
    """Totals of all runs, and what B is beside A, in words; read when they are looked at."""
    fold = st.expander("Totals of all runs", key="compare_sums", on_change="rerun")
    if fold.open:
        with fold:
            _sums(compared)


def _sums(compared: Compared) -> None:
    results = {name: _totals(reader, reader.uid, reader.stamp) for name, reader in compared.runs.items()}
    table = totals_table(results, (compared.a, compared.b))
    columns = ["quantity", *results, "B beside A"]
    st.dataframe(table[columns], hide_index=True, width="stretch", height="content", column_config=_WIDE)
    without = [name for name, reader in compared.runs.items() if "regret" not in reader.metrics()]
    sentence = (
        f"A: {compared.a}. B: {compared.b}. Bytes are decimal (1 MB = 10^6 bytes). Coverage and regret are means over "
        "all steps, layers and query heads; after the runs part, they stand for different contexts."
    )
    if without:
        sentence += f" No regret of {joined(without)}: full attention by span was not recorded there."
    st.caption(plain(sentence))
    menu(table, f"{compared.stem}-totals", "compare_totals", image=False)
    _phases(compared)


def _phases(compared: Compared) -> None:
    """Draw where the time of the runs' steps went, one stacked bar per run whose phases were timed."""
    means = {name: phase_means(reader) for name, reader in compared.runs.items()}
    timed = {name: each for name, each in means.items() if each}
    if not timed:
        return
    links = joined(sorted({str(reader.meta.link or "not recorded") for reader in compared.runs.values()}))
    table = pd.DataFrame(timed).rename_axis("phase").reset_index()
    chart(by_run(timed), table, f"{compared.stem}-phases", "compare_phases", "Mean time of a step by phase and run")
    sentence = f"Phases of a step, mean over its steps. Link: {links}. Compare runs of one machine and link alone."
    share = weights_share(compared.runs[compared.a].meta)
    if share is not None:
        sentence += (
            f" The model's weights are {share:.0%} of the bytes that a step of full KV reads in run A. Where reading "
            f"memory bounds a step, no method's step takes less than {share:.2f} of full KV's time."
        )
    st.caption(plain(sentence))


@st.cache_data(max_entries=128, show_spinner=False)
def _totals(_reader: TraceReader, uid: str, changed: int) -> list[Total]:
    return totals(_reader)

"""What a study is held against: the thresholds of its gate, and the settings of its methods' papers."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import data
from kvlens.app.ui.common.widgets import plain
from kvlens.studies.checks import checks
from kvlens.studies.papers import beside_paper
from kvlens.studies.table import Results


def checks_of(results: Results) -> None:
    """Draw the checks of a gate's study, the ones that are not passed first; nothing for another study."""
    thresholds = results.info.thresholds
    if thresholds is None:
        return
    rows = sorted(checks(results, thresholds), key=lambda check: check.passed)
    passed = sum(check.passed for check in rows)
    st.markdown(f"##### Gate: {passed} of {len(rows)} checks passed")
    table = pd.DataFrame(
        [(row.arm, row.threshold, row.state.replace("_", " "), row.sentence) for row in rows],
        columns=["arm", "threshold", "outcome", "measured"],
    )
    st.dataframe(table, hide_index=True, key="study_gate")


def beside_paper_of(results: Results) -> None:
    """Draw the settings of a chosen arm beside its paper's."""
    names = [results.labels[arm.key()] for arm in results.arms if arm.method != methods.REFERENCE]
    if not names:
        return
    with st.expander("Why is my score not the paper's?"):
        label = str(st.selectbox("Arm", names, key="study_paper"))
        rows = beside_paper(results, label, data.runs_dir())
        st.caption(plain(methods.get(results.arm(label).method).paper))
        table = pd.DataFrame([vars(row) for row in rows]).rename(columns={"study": "this study"})
        st.dataframe(table.style.apply(_marked, axis=1), hide_index=True, key=f"study_paper_{label}")
        st.caption("check: the paper's value is not recorded here. ours: the paper is silent, kvlens decided.")


def _marked(row: pd.Series) -> list[str]:
    """The style of a row: one that differs is bold."""
    return ["font-weight: bold" if row["state"] == "differs" else ""] * len(row)

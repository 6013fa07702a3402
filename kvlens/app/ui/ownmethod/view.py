"""A method in a Python file on this machine: named by its path, run with a person's consent, checked by the truths of
every run. The file never comes through the browser, and this server's process never imports it."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import access, reach, widgets
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobview import manager
from kvlens.checking.methodfile import MOST_BYTES
from kvlens.methods.filenames import SUFFIX
from kvlens.text.plaintext import visible
from kvlens.text.units import counted

POLL_S = 0.5
_SHOWN = "own_shown"
"""key of the session: (path, SHA-256 of the text) that the page drew last"""
WORDS = {"pass": "✓ holds", "FAIL": "✗ fails", "none": "— no case"}
REFUSED = {
    "open_server": "This server answers other machines, so it runs no file. Start kvlens on this machine's address.",
    "no_token": "This server asks for no token, so every user of this machine could run a file here as you. "
    "Start kvlens with its token.",
}
"""code -> why no file is run from this page"""


def refusal() -> str | None:
    """Return the code why this server runs no file; None if it may."""
    if reach.answers_others():
        return "open_server"
    return "no_token" if access.token() is None else None


def command(path: str, digest: str) -> list[str]:
    """Return the command that checks the file, in a process of its own, if it still has this SHA-256 then."""
    return [sys.executable, "-m", "kvlens", "check-method", path, "--json", "--progress-json", "--sha256", digest]


def show() -> None:
    """Draw the form, the check that runs, and its result."""
    st.subheader("Own method", anchor=False)
    st.markdown(
        "See whether a method of your own keeps the truths of every run, and the smallest case in which it does not."
    )
    if (code := refusal()) is not None:
        st.warning(REFUSED[code])
        return
    path = st.text_input(
        "Python file on this machine",
        key="own_file",
        placeholder="~/my_method.py, or ~/my_method.py:name of one of several methods",
    ).strip()
    digest = _source(path) if path else ""
    last_shown = st.session_state.get(_SHOWN)
    st.session_state[_SHOWN] = (path, digest)
    if last_shown is not None and last_shown[0] == path and last_shown[1] not in ("", digest):
        st.warning("The file has changed since it was shown. Read it again, then tick again.")
    consent = st.checkbox(
        "I know this file. Its code runs on this machine with my rights.",
        key=f"own_consent_{path}_{digest}",
        disabled=not digest,
    )
    if st.button("Check it", type="primary", icon=":material/rule:", disabled=not (digest and consent)):
        argv = command(str(Path(path).expanduser().absolute()), digest)
        st.query_params["job"] = manager().submit(argv, f"Check of {Path(path).name}")
        st.rerun()
    if (job := manager().get(st.query_params.get("job", ""))) is not None and "check-method" in job.argv:
        st.fragment(_checked, run_every=POLL_S if job.active else None)(job.id)


def _source(path: str) -> str:
    """Draw the file as text, so that it is read before it is run. Returns its SHA-256; '' where it cannot be read."""
    try:
        file = Path(path.partition(f"{SUFFIX}:")[0] + SUFFIX if f"{SUFFIX}:" in path else path).expanduser()
        if not file.is_file() or file.suffix != SUFFIX or file.stat().st_size > MOST_BYTES:
            raise OSError
        source = file.read_bytes()
        text = source.decode("utf-8")
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a home folder that nobody has
        widgets.error(f"{path[:120]} is no Python file that can be read here; give its whole path.")
        return ""
    with st.expander(f"Source of {widgets.plain(file.name)}"):
        st.code(visible(text), language="python", line_numbers=True, height=420)
    return sha256(source).hexdigest()


def progress_text(job: Job) -> str:
    """Return how far a check is, as Markdown that shows the file's name literally."""
    return f"{widgets.plain(job.title)}: {counted(job.done, 'case')} begun"


def _checked(job_id: str) -> None:
    job = manager().get(job_id)
    if job is None:
        return
    if job.active:
        left_column, right = st.columns([6, 1], vertical_alignment="center")
        left_column.progress(0.0, text=progress_text(job))
        if right.button("Cancel", key=f"cancel_{job.id}", width="stretch"):
            manager().cancel(job.id)
        st.session_state["own_watched"] = job.id
        return
    if st.session_state.pop("own_watched", None) == job.id:
        st.rerun()  # the poll ends
    result = result_of(job)
    if result is None:
        widgets.error(job.message or "The check ended without a result.", job.log)
    else:
        _result(result)


def result_of(job: Job) -> dict[str, Any] | None:
    """Return the report that a check printed (`kvlens.checking.check.Report.plain`); None if it printed none."""
    for line in reversed(list(job.log)):
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict) and isinstance(report.get("truths"), list):
            return report
    return None


def frame_of(result: dict[str, Any]) -> pd.DataFrame:
    """Return one row per truth: the truth, whether it holds, its cases, its smallest failing case."""
    return pd.DataFrame(
        {
            "truth": [row["says"] for row in result["truths"]],
            "here": [WORDS[row["status"]] for row in result["truths"]],
            "cases": [row["cases"] for row in result["truths"]],
            "smallest case that fails": [_case(row["failure"]) for row in result["truths"]],
        }
    )


def _case(failure: dict[str, Any] | None) -> str:
    if failure is None:
        return ""
    wrong = failure["mismatch"]
    places = [f"{name} {wrong[name]}" for name in ("step", "layer", "head") if wrong.get(name) is not None]
    case = ", ".join([failure["model"], f"{failure['prompt_tokens']} prompt tokens", *places])
    return f"{case}: expected {wrong['expected']}, got {wrong['actual']}"


def _result(result: dict[str, Any]) -> None:
    failed = [row for row in result["truths"] if row["status"] == "FAIL"]
    name = widgets.plain(str(result["method"]))
    if result["passed"]:
        st.success(f"{name} keeps {len(result['truths'])} truths.")
    else:
        st.error(f"{name} breaks {counted(len(failed), 'truth')}." if failed else f"{name} ran in no case.")
    st.dataframe(
        frame_of(result),
        hide_index=True,
        width="stretch",
        height=40 + 35 * len(result["truths"]),
        column_config={"smallest case that fails": st.column_config.TextColumn(width="large")},
    )
    if result["refused"]:
        sentence = widgets.plain(str(result["refused"][0]))
        st.caption(f"{counted(len(result['refused']), 'case')} refused by the method, the first: {sentence}")
    st.caption(
        "Small random models and the demo model, in float32 and bfloat16. A package that announces the method "
        "brings it into every form: docs/adding-a-method.md."
    )

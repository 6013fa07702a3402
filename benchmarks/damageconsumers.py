"""The consumers of stored runs that benchmarks/damage.py drives: commands, the API, pages. Each returns `done`, the
code or sentence by which it refused, `traceback ...` or `wrong ...`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

GOOD, BAD = "20260101-000000-good", "20260102-000000-damaged"
PAGES = ("replay", "heads", "memory", "spans", "compare", "")
ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: str, good: bool = False) -> str:
    """Run one `kvlens` command in this process. good: it must succeed, since it is about the good run too."""
    from kvlens.cli import main as entry

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    status: object = 0
    from kvlens.cli import options

    options.err.file = err
    sys.argv = ["kvlens", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            entry.main()
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        return f"traceback {traceback.format_exc()[-1500:]}"
    text = err.getvalue()
    if "Traceback" in text or "unexpected_error" in text:
        return f"traceback {text[-1500:]}"
    if status in (0, None):
        return "done"
    if good:
        return f"wrong: exit status {status}: {text[-300:]}"
    return text.strip()[-300:] if text.startswith("kvlens: ") and text.count("\n") <= 1 else f"wrong: {text[-300:]}"


def call(function: Callable[[], object]) -> str:
    """Call the API."""
    from kvlens.api.errors import KvlensError

    try:
        function()
    except KvlensError as error:
        return f"{error.code}: {error}"[:300]
    except BaseException:
        return f"traceback {traceback.format_exc()[-1500:]}"
    return "done"


def page(runs: Path, name: str) -> str:
    """Open a page on the damaged run in Streamlit's own test runner."""
    import streamlit as st
    from streamlit.testing.v1 import AppTest

    from kvlens.app.ui.common.widgets import FAILED

    os.environ["KVLENS_RUNS"] = str(runs)
    os.chdir(ROOT)
    st.cache_resource.clear()
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    parameters = {"run": GOOD, "cmp": BAD} if name == "compare" else {"run": BAD} if name else {}
    for key, value in parameters.items():
        app.query_params[key] = value
    try:
        if name:
            app.switch_page(f"pages/{name}.py")
        app.run()
    except BaseException:
        return f"traceback {traceback.format_exc()[-1500:]}"
    failed = [box.value for box in app.error if box.value.startswith(FAILED.split(":")[0]) or "unexpected" in box.value]
    if app.exception or failed:
        return f"traceback {app.exception or failed}"[:1500]
    return "done" if not app.error else str(app.error[0].value)[:300]


FEW = ("list", "diagnose --json", "report", "report --player")
"""consumers of a kind like others that all consumers met"""


def consumers(runs: Path, every: bool) -> dict[str, Callable[[], str]]:
    """Name -> consumer; all of them, or FEW."""
    import kvlens
    from kvlens.store.export import EXPORTS

    folder, out = ("--runs", str(runs)), str(runs.parent / "out")
    calls: dict[str, Callable[[], str]] = {
        "list": lambda: command("runs", "list", *folder, good=True),
        "list --json": lambda: command("runs", "list", "--json", *folder, good=True),
        "show": lambda: command("runs", "show", BAD, *folder),
        "diagnose": lambda: command("diagnose", *folder, good=True),
        "diagnose --json": lambda: command("diagnose", "--json", *folder, good=True),
        "report": lambda: command("report", BAD, "--out", out, *folder),
        "report of the good run": lambda: command("report", GOOD, "--out", out, *folder, good=True),
        "report --player": lambda: command("report", BAD, "--player", "--out", out, *folder),
        "report --against": lambda: command("report", GOOD, "--against", BAD, "--out", out, *folder),
        "api runs": lambda: call(lambda: kvlens.runs(runs=runs)),
        "api verdict": lambda: call(lambda: kvlens.open(BAD, runs=runs).verdict),
        "api replay": lambda: call(lambda: kvlens.open(BAD, runs=runs)._repr_html_()),
    }
    for name in ("steps", "heads", "spans", "decisions", "transfers"):
        calls[f"api {name}"] = lambda name=name: call(lambda: getattr(kvlens.open(BAD, runs=runs), name)())  # type: ignore[misc]
    for table in (*EXPORTS, "outcome", "chrome-trace"):
        for fmt in ("json",) if table == "chrome-trace" else ("csv", "json", "parquet"):
            arguments = ("export", BAD, "--what", table, "--format", fmt, "--out", out, *folder)
            calls[f"export {table} {fmt}"] = lambda arguments=arguments: command(*arguments)  # type: ignore[misc]
    for name in PAGES:
        calls[f"page {name or 'home'}"] = lambda name=name: page(runs, name)  # type: ignore[misc]
    calls["recover"] = lambda: command("runs", "recover", BAD, *folder)
    return calls if every else {name: calls[name] for name in FEW}

"""Check and import in a process of its own, whose memory and time are limited: a file of a few bytes can decode to more
than a machine has, or crash its decoder. What the process returns is JSON of a bounded size."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlens import PACKAGE
from kvlens.store.errors import TraceError, sentence
from kvlens.store.reader import TraceReader
from kvlens.store.recover import delete_run
from kvlens.store.runinfo import new_uid
from kvlens.trace.check import check
from kvlens.trace.faults import BadTrace, Fault
from kvlens.trace.importing import import_checked

MOST_MEMORY = 8 << 30
"""bytes of address space"""
MOST_SECONDS = 1800
"""of processor time"""
_MODULE = "kvlens.trace.limited"


def check_trace(folder: Path, memory: int = MOST_MEMORY) -> dict[str, Any]:
    """Check a trace and return its summary: engine, method, steps, complete, rows (table -> rows). Raises BadTrace."""
    return _limited(["check", str(folder.absolute())], memory)


def import_trace(folder: Path, runs_dir: Path, memory: int = MOST_MEMORY) -> str:
    """Check a trace, store it as a run and return the run's uid. Raises BadTrace, and TraceError where the run cannot
    be written."""
    uid = new_uid()
    try:
        _limited(["import", str(folder.absolute()), str(runs_dir.absolute()), uid], memory)
    except BaseException:
        with contextlib.suppress(TraceError):  # the process was killed, or has left none
            delete_run(runs_dir, uid)
        raise
    with TraceReader.open(runs_dir, uid):
        return uid


def _limited(arguments: list[str], memory: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", _MODULE, str(memory), *arguments]
    ended = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": paths}, check=False)
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        code = "trace_too_large" if b"MemoryError" in ended.stderr or ended.returncode < 0 else "trace_unreadable"
        rule = f"at most {memory:,} bytes of memory and {MOST_SECONDS} s"
        raise BadTrace([Fault(code, rule=rule, value=f"exit status {ended.returncode}")]) from None
    if "faults" in answer:
        raise BadTrace([Fault(**fault) for fault in answer["faults"]])
    if "error" in answer:
        raise TraceError(str(answer["error"]))
    return dict(answer)


def _answer(action: str, words: list[str]) -> dict[str, Any]:
    if action == "import":
        return {"uid": import_checked(Path(words[0]), Path(words[1]), words[2])}
    checked = check(Path(words[0]))
    head = checked.head
    rows = {name: table.num_rows for name, table in checked.tables.items()}
    summary = {"engine": head.engine, "method": head.method, "model": head.model}
    return {**summary, "steps": head.steps, "complete": head.complete, "rows": rows}


def main() -> None:
    """Carry out one action and print its answer as JSON. Arguments: bytes of memory, `check` or `import`, folders, the
    run's uid."""
    memory, action, *words = sys.argv[1:]
    for limit, most in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CPU, MOST_SECONDS)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(limit, (most, most))
    try:
        answer = _answer(action, words)
    except BadTrace as bad:
        answer = {"faults": [asdict(fault) for fault in bad.faults]}
    except MemoryError:
        rule = f"at most {int(memory):,} bytes of memory"
        answer = {"faults": [asdict(Fault("trace_too_large", rule=rule))]}
    except (TraceError, OSError) as error:
        answer = {"error": str(error) if isinstance(error, TraceError) else f"{sentence(error)}."}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""What every consumer does with a crafted trace beside a good run.

    python -m benchmarks.damage [--only WORD] [--jobs N] [--out FILE]

For each kind of damage of tests/fault/crafted.py a process of its own makes a folder with a good run and a damaged one,
then lists, diagnoses, reports, exports, compares, recovers and opens them: the command line, the API, the pages. An
exception that is no sentence counts as a traceback, a consumer that takes longer than LONGEST_S as a hang. The command
writes the counts that `python -m kvlens.lab.studies.damage` draws as docs/evidence/damage.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.damageconsumers import BAD, GOOD, consumers
from kvlens.lab.bench.provenance import about
from tests.fault.crafted import Kind, damage, kinds
from tests.synthetic import write_synthetic

OUT = Path("kvlens/lab/results/damage.json")
LONGEST_S = 90
"""a consumer that takes longer hangs"""


def write_base(folder: Path) -> None:
    """Write the good run, and the one that is damaged, in folders of their own."""
    known = {"answer": "4172", "reference": GOOD, "oracle": {"every": 1, "layers": [0, 1]}, "prompt_tokens": 120}
    write_synthetic(folder, 2, 4, 2, 6, 8, uid=GOOD, **(known | {"reference": None}))
    write_synthetic(folder, 2, 4, 2, 6, 8, uid=BAD, seed=1, **known)


def apart(work: Callable[[Path], Any], longest_s: float) -> dict[str, Any]:
    """Run `work` in a forked process with a folder of its own. Returns its JSON, or {"hang": the last line it wrote}."""
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
            status = 1
            try:
                (folder / "out").write_text(json.dumps(work(folder)), encoding="utf-8")
                status = 0
            finally:
                os._exit(status)
        until = time.monotonic() + longest_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"hang": (folder / "now").read_text(encoding="utf-8") if (folder / "now").exists() else "start"}
            time.sleep(0.02)
        out = folder / "out"
        return (
            json.loads(out.read_text(encoding="utf-8"))
            if out.exists()
            else {"died": (folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]}
        )


def tried(base: Path, kind: Kind, whole: bool) -> Callable[[Path], dict[str, Any]]:
    """Work for `apart`: do the damage, then run every consumer. Returns what each came to."""

    def work(folder: Path) -> dict[str, Any]:
        runs = folder / "runs"
        shutil.copytree(base, runs)
        if not damage(runs / BAD / "trace.duckdb", kind):
            return {"refused by the file": True}
        results: dict[str, Any] = {}
        for name, consume in consumers(runs, whole).items():
            (folder / "now").write_text(name, encoding="utf-8")
            results[name] = consume()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"consumers": results, "peak_bytes": peak}

    return work


def main() -> None:
    """Try every kind and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="damage-base-"))
    apart(lambda _: write_base(base), LONGEST_S)
    rows = []
    chosen = [kind for kind in kinds() if arguments.only in kind.name]
    for number, kind in enumerate(chosen):
        result = apart(tried(base, kind, kind.sound is not False), 3 * LONGEST_S)
        row = {"kind": kind.name, "group": kind.group, "sound": kind.sound, **summed(result)}
        rows.append(row)
        if row["tracebacks"] or row["hangs"] or row["wrong"]:
            print(json.dumps({"kind": kind.name, **{key: row[key] for key in ("tracebacks", "hangs", "wrong")}}), flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    shutil.rmtree(base)
    arguments.out.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(Counter(row["opened"] for row in rows), sum(row["calls"] for row in rows), "calls")


def summed(result: dict[str, Any]) -> dict[str, Any]:
    """A row of the results: what the consumers of one kind came to."""
    outcomes: dict[str, str] = result.get("consumers", {})
    tracebacks = {name: text for name, text in outcomes.items() if text.startswith("traceback")}
    wrong = {name: text for name, text in outcomes.items() if text.startswith("wrong")}
    if "died" in result:
        tracebacks["process"] = result["died"]
    return {
        "calls": len(outcomes),
        "opened": outcomes.get("api open", "not made") == "done",
        "code": outcomes.get("api open", ""),
        "tracebacks": tracebacks,
        "wrong": wrong,
        "hangs": [result["hang"]] if "hang" in result else [],
        "peak_bytes": result.get("peak_bytes"),
    }


if __name__ == "__main__":
    main()

"""Lies that a method's plugin can tell, told to the engine one by one on the demo model, and who catches each.

A lie is a method that changes what it is handed, returns wrong figures, hides tensors, ends the process or hangs. The
table shows the code and the hook with which the run ended; for tensors that a method hides, the bytes that the run
counts. `python -m kvlens.lab.studies.plugin_lies --write docs/evidence/plugin-lies.md`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from kvlens import hangs
from kvlens.lab.studies.changing_lies import CHANGING_LIES
from kvlens.lab.studies.lies import HIDES, Lie
from kvlens.lab.studies.outcome_lies import OUTCOME_LIES
from kvlens.methods.faults import MethodFault
from kvlens.records import StepRecord

NEW = 3
TEXT = "The key of the door is 4821. The river was wide and the bridge was old. " * 4
LIMIT_S = 0.5
"""seconds that a hook may take in this study"""


@dataclass(frozen=True)
class Caught:
    """What became of a lie."""

    lie: Lie
    code: str = ""
    """of the fault; empty: the run ended as if nothing had happened"""
    hook: str = ""
    hidden: int = 0
    """bytes counted as held unannounced"""
    harmless: bool = False
    """the run recorded what it records of the method without the lie"""

    @property
    def caught(self) -> bool:
        """Return True if the run ended with a fault, or recorded the truth and counts what was hidden."""
        return bool(self.code) or (self.harmless and (self.hidden > 0 or self.lie.kind != HIDES))

    @property
    def way(self) -> str:
        """How it was caught, as the table has it."""
        if self.code:
            return f"`{self.code}`, hook `{self.hook}`"
        counted = f"counted: {self.hidden:,} bytes" if self.hidden else ""
        harmless = "without effect: the hook has a copy" if self.harmless and self.lie.kind != HIDES else ""
        return "; ".join(filter(None, (counted, harmless))) if self.caught else "not caught"


class Records:
    """A sink that keeps what was measured of each step."""

    def __init__(self) -> None:
        self.figures: list[bytes] = []

    def prefill(self, record: object) -> None:
        """Discard the prompt."""

    def step(self, record: StepRecord) -> None:
        """Keep the columns of query heads."""
        self.figures.append(record.text.encode() + b"".join(column.tobytes() for column in record.head.values()))


@contextmanager
def limited_hooks() -> Iterator[None]:
    """Let hooks hang for a short time only."""
    former = os.environ.get(hangs.VARIABLE)
    os.environ[hangs.VARIABLE] = str(LIMIT_S)
    try:
        yield
    finally:
        os.environ.pop(hangs.VARIABLE)
        if former is not None:
            os.environ[hangs.VARIABLE] = former


def tell_all() -> list[Caught]:
    """Return what became of every lie."""
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.text.prompts import PromptText, tokenize

    loaded = load("demo", "cpu")
    prompt = tokenize(PromptText(TEXT), loaded.tokenizer, loaded.max_positions, NEW)
    with limited_hooks():
        return [tell(Engine(loaded), prompt, lie) for lie in (*CHANGING_LIES, *OUTCOME_LIES)]


def tell(engine: Any, prompt: Any, lie: Lie) -> Caught:
    """Return what became of one lie."""
    method = lie.method()
    try:
        figures, hidden = record(engine, prompt, method)
    except MethodFault as fault:
        return Caught(lie, fault.code, fault.hook)
    finally:
        lie.restore()
    return Caught(lie, hidden=hidden, harmless=figures == record(engine, prompt, lie.base)[0])


def record(engine: Any, prompt: Any, method: type[Any]) -> tuple[list[bytes], int]:
    """Run a method; return what was measured of its steps, and the bytes that it held unannounced."""
    from kvlens.engine.engine import Options

    records, options = Records(), Options(max_new=NEW, coverage=True)
    result = engine.run(prompt, method, method.Parameters(), None, options, records)
    return records.figures, result.unannounced_bytes


def page(rows: list[Caught], day: str) -> str:
    """Return the table with its sums, as Markdown. day: on which the lies were told, as ISO 8601."""
    caught = sum(row.caught for row in rows)
    lines = [
        "# Lies of a plugin, and who catches them",
        "",
        f"{len(rows)} lies, {caught} caught. Each is a method that a plugin could bring, run on the demo model and "
        "recorded. A lie is caught if the run ends with a code that names the hook, if hidden bytes are counted as "
        "resident, or if the hook had a copy, so that the records are those of the method without the lie.",
        "",
        "| kind | the lie | how it is caught |",
        "| --- | --- | --- |",
        *(f"| {row.lie.kind} | {row.lie.words} | {row.way} |" for row in rows),
        "",
        "What no check can see: a score or a journal note on the method's own scale, and tensors in another module or "
        "in an object of C code.",
        "Bytes that a method holds are counted at the end of prefill, at every 16th step and at the end.",
        "Code that computes in C and never returns to the interpreter is not interrupted.",
        "",
        "`tests/fault/test_plugin_faults.py` has plugins that end the process, print or hang at import.",
        "",
        f"Made by `python -m kvlens.lab.studies.plugin_lies --write docs/evidence/plugin-lies.md` on {day}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write; without it the page is printed")
    options = parser.parse_args()
    text = page(tell_all(), date.today().isoformat())
    if options.write is None:
        print(text, end="")
    else:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

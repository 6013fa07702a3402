"""The rates that steps are replayed at: what `kvlens bench rates` has recorded, what the papers say, and what is swept.
Plain JSON, so that a machine that has torch alone can read them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens import REPOSITORY
from kvlens.gpu.bench.floors import TITLES, USED, Rates
from kvlens.gpu.bench.result import RateSource

FILE = REPOSITORY / "benchmarks" / "results" / "rates.json"
RECORDED = ("sekv", "freekv", "sentkv", "blocking")
"""methods that the file has"""
SAME = {"blocking_host": "blocking"}
"""method -> the one whose rates it has"""
PAPERS = Rates()
OURS = ("miss", "zoom")
"""of the papers' rates those that no paper gives"""
MISSING = "There are no recorded rates, so those of the papers are replayed: `kvlens bench rates` records some."
TURNED = ("blocking", "freekv")
"""methods that a sweep takes over its grid"""
WORDS: dict[RateSource, str] = {"recorded": "recorded", "papers": "the papers'", "set": "set", "none": ""}


@dataclass(frozen=True)
class Line:
    """One method's recorded rates: of all steps together, and the 10th and 90th percentile over steps."""

    rates: Rates
    percentiles: Mapping[str, tuple[float, float]]
    prompts: int
    steps: int


@dataclass(frozen=True)
class RateTable:
    """method -> its recorded rates; empty where there is no file. about: on what they were recorded."""

    lines: Mapping[str, Line] = field(default_factory=dict)
    about: str = ""

    @property
    def recorded(self) -> bool:
        return bool(self.lines)

    def line(self, method: str) -> Line | None:
        return self.lines.get(SAME.get(method, method))

    def of(self, method: str) -> Rates:
        """What a step of the method is replayed at unless it is swept: the recorded rates, else the papers'."""
        line = self.line(method)
        return PAPERS if line is None else line.rates

    def source(self, method: str, rates: Rates) -> RateSource:
        """Where these rates come from, as far as the method depends on them."""
        line, used = self.line(method), rates.of(method)
        if not used:
            return "none"
        if line is not None and used == line.rates.of(method):
            return "recorded"
        return "papers" if used == PAPERS.of(method) else "set"

    def told(self) -> str:
        """One sentence: where the rates of a result come from."""
        return (
            f"Rates of replayed decisions: recorded ({self.about}), where a row says no other."
            if self.recorded
            else MISSING
        )


def at_papers(method: str) -> Rates:
    """The papers' rates, whatever the method."""
    return PAPERS


def read(path: Path | None = None) -> RateTable:
    """The recorded rates, of kvlens's own results where no file is named; an empty table where there is no file. Raises
    ValueError with one sentence for a file of something else."""
    path = path or FILE
    if not path.is_file():
        return RateTable()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = {method: _line(method, found["methods"][method]) for method in RECORDED}
        return RateTable(lines, _about(found["about"], lines))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        why = (
            f"'{problem.args[0]}' is missing"
            if isinstance(problem, KeyError)
            else str(problem).splitlines()[0].rstrip(".")
        )
        raise ValueError(
            f"'{path.name}' does not hold recorded rates ({why}): make it anew with kvlens bench rates."
        ) from None


def _line(method: str, found: dict[str, Any]) -> Line:
    rates = {name: _share(method, name, found["rates"][name]["mean"]) for name in USED[method]}
    spread = {
        name: tuple(_share(method, name, found["rates"][name][end]) for end in ("p10", "p90")) for name in USED[method]
    }
    return Line(
        Rates(**rates),
        {name: (low, high) for name, (low, high) in spread.items()},
        int(found["prompts"]),
        int(found["steps"]),
    )


def _share(method: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} of {method} is {value!r}, not a share")
    return float(value)


def _about(about: dict[str, Any], lines: Mapping[str, Line]) -> str:
    asked, line = about["request"], next(iter(lines.values()))
    return (
        f"model {asked['model']}, tasks {', '.join(asked['tasks'])} of {asked['length']} tokens, right "
        f"answers, budget {asked['budget']}, "
        f"{line.prompts} prompts, {line.steps} steps of each method, {about['date']}"
    )


def words(rates: Mapping[str, float], source: RateSource) -> str:
    """'miss 0.3, correction 0.14 (the papers')'; nothing for a method that has none."""
    return ", ".join(f"{name} {value:.3g}" for name, value in rates.items()) + f" ({WORDS[source]})" if rates else ""


def swept(table: RateTable, methods: Sequence[str]) -> list[tuple[str, Rates]]:
    """What a sweep measures of `methods`: FreeKV and blocking recall over misses and corrections, the papers' among
    them; and where default cells are at recorded rates, the other methods that recall at the papers'."""
    found = []
    for miss in (0.1, 0.3, 1.0):
        found.append(("blocking", Rates(miss=miss)))
        found += [("freekv", Rates(miss=miss, correction=rate)) for rate in (0.0, 0.14, 0.5)]
    others = [method for method in USED if method in methods and method not in TURNED]
    return found + [(method, PAPERS) for method in others if table.recorded]


def titled(method: str, source: RateSource) -> str:
    """The method's title with where its rates come from."""
    return TITLES[method] + ("" if source == "none" else f", {WORDS[source]} rates")

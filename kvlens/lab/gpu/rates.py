"""The rates that steps are replayed at: what `kvlens bench rates` has recorded, what the papers say, and what is swept.
Plain JSON, so that a machine that has torch alone can read them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens import PACKAGE
from kvlens.lab.gpu.settings import Rates, Setting, settings
from kvlens.lab.results.gpu import RateSource

FILE = PACKAGE / "lab" / "results" / "rates.json"
MISSING = "There are no recorded rates, so those of the papers are replayed: `kvlens bench rates` records some."
WORDS: dict[RateSource, str] = {"recorded": "recorded", "papers": "the papers'", "set": "set", "none": ""}


@dataclass(frozen=True)
class Line:
    """The recorded rates of one setting: of all steps together, and the 10th and 90th percentile over steps."""

    rates: Rates
    percentiles: Mapping[str, tuple[float, float]]
    prompts: int
    steps: int


@dataclass(frozen=True)
class RateTable:
    """Name of a setting -> its recorded rates; empty where there is no file. about: on what they were recorded."""

    lines: Mapping[str, Line] = field(default_factory=dict)
    about: str = ""

    @property
    def recorded(self) -> bool:
        return bool(self.lines)

    def choose(self, setting: Setting) -> Rates:
        """What a step is replayed at unless it is swept: the recorded rates, else the papers'."""
        line = self.lines.get(setting.name)
        return setting.rates if line is None else line.rates

    def source(self, setting: Setting, rates: Rates) -> RateSource:
        line = self.lines.get(setting.name)
        if not setting.rates:
            return "none"
        if line is not None and rates == line.rates:
            return "recorded"
        return "papers" if rates == setting.rates else "set"

    def describe(self) -> str:
        """One sentence: where the rates of a result come from."""
        if not self.recorded:
            return MISSING
        return f"Rates of replayed decisions: recorded ({self.about}), where a row says no other."


def read(path: Path | None = None) -> RateTable:
    """The recorded rates, of kvlens's own results where no file is named; an empty table where there is no file. Raises
    ValueError with one sentence for a file of something else."""
    path = path or FILE
    if not path.is_file():
        return RateTable()
    try:
        message = json.loads(path.read_text(encoding="utf-8"))
        held = message["methods"]
        replayed = [setting for setting in settings().values() if setting.rates and setting.name in held]
        lines = {setting.name: _line(setting, held[setting.name]) for setting in replayed}
        return RateTable(lines, _about(message["about"], lines))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as problem:
        if isinstance(problem, KeyError):
            why = f"'{problem.args[0]}' is missing"
        else:
            why = str(problem).splitlines()[0].rstrip(".") if str(problem) else "no rates are in it"
        raise ValueError(
            f"'{path.name}' does not hold recorded rates ({why}): make it anew with kvlens bench rates."
        ) from None


def _line(setting: Setting, mapping: dict[str, Any]) -> Line:
    def share(name: str, kind: str) -> float:
        value = mapping["rates"][name][kind]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or math.isnan(value):
            raise ValueError(f"{name} of {setting.name} is {value!r}, not a share")
        return float(value)

    return Line(
        {name: share(name, "mean") for name in setting.rates},
        {name: (share(name, "p10"), share(name, "p90")) for name in setting.rates},
        int(mapping["prompts"]),
        int(mapping["steps"]),
    )


def _about(about: dict[str, Any], lines: Mapping[str, Line]) -> str:
    request, line = about["request"], next(iter(lines.values()))
    return (
        f"model {request['model']}, tasks {', '.join(request['tasks'])} of {request['length']} tokens, right answers, "
        f"budget {request['budget']}, {line.prompts} prompts, {line.steps} steps of each method, {about['date']}"
    )


def words(rates: Rates, source: RateSource) -> str:
    """'miss 0.3, correction 0.14 (the papers')'; nothing for a method that has none."""
    return ", ".join(f"{name} {value:.3g}" for name, value in rates.items()) + f" ({WORDS[source]})" if rates else ""


def swept(table: RateTable, names: Sequence[str]) -> list[tuple[Setting, Rates]]:
    """What a sweep measures of the settings named: the rates that each asks for, and where default cells are at
    recorded rates, the papers'."""
    replayed = [setting for name, setting in settings().items() if name in names and setting.rates]
    rows = [(setting, rates) for setting in replayed for rates in setting.sweep]
    papers = [(setting, setting.rates) for setting in replayed if setting.name in table.lines]
    return rows + [pair for pair in papers if pair not in rows]

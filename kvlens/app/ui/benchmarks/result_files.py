"""The result files of the Benchmarks page by kind and model. A file that is none is told where its kind is shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from kvlens import PACKAGE
from kvlens.app.ui.benchmarks.griddata import suites
from kvlens.app.ui.common import data
from kvlens.app.ui.common.widgets import error, plain
from kvlens.lab.results.names import table_name
from kvlens.methods.naming import installed
from kvlens.models import catalogue
from kvlens.models.find import DEMO

SHIPPED = PACKAGE / "lab" / "results"
KINDS = ("quality", "explain", "claims", "text")


def folder() -> Path:
    """Where results are read: $KVLENS_RESULTS, else the ones in the repository."""
    return Path(os.environ.get("KVLENS_RESULTS") or SHIPPED)


@dataclass(frozen=True)
class ResultFile:
    """One result file."""

    name: str
    model: str
    content: dict[str, Any]


def files(kind: str) -> tuple[list[ResultFile], list[str]]:
    """The results of a kind, KIND.json and KIND-*.json, and one sentence per file that is none."""
    rows, problems = [], []
    for path in sorted([*folder().glob(f"{kind}.json"), *folder().glob(f"{kind}-*.json")]):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            problems.append(f"the result file '{path.name}' is not JSON; measure it again.")
            continue
        model = _model(content)
        if model is None:
            problems.append(f"the file {path.name} lacks fields this version needs; measure it again{kind}.")
        else:
            rows.append(ResultFile(path.name, model, content))
    return rows, problems


def _model(content: Any) -> str | None:
    """Which model a result is of; None for something else."""
    try:
        about = content["about"] if "about" in content else next(iter(content["methods"].values()))["about"]
        return str(about["request"]["model"] if "request" in about else about["model"])
    except (KeyError, TypeError, StopIteration, AttributeError):
        return None


def list_results(kind: str, model: str | None) -> tuple[list[ResultFile], bool]:
    """The results of a kind on a model, and whether a file of the kind was damaged, which is said here."""
    results, problems = files(kind)
    for sentence in problems:
        error(f"{sentence[0].upper()}{sentence[1:]}")
    return [result for result in results if result.model == model], bool(problems)


def models() -> list[str]:
    """The models of which something was measured: those with a name here in its order, which has the toy last, and the
    others before it."""
    sweeps = [suite.model for suite in suites(folder())[0].values()]
    known_names = {result.model for kind in KINDS for result in files(kind)[0]} | set(sweeps)
    order = {name: place for place, name in enumerate(catalogue.names())}
    return sorted(known_names, key=lambda name: (name == DEMO, order.get(name, len(order)), name))


def nothing(text: str, command: str, model: str | None) -> None:
    """That a kind of result is not there, and where it is said how it is made. command: of `kvlens bench`."""
    of_model = f" of {model}" if model else ""
    st.info(plain(f"No {text}{of_model} yet. docs/evidence/benchmarks.md says how the part “{command}” is measured."))


def sort_key(result: ResultFile) -> tuple[bool, int]:
    """The question with its context before the question after it, short prompts before long ones, and last what does
    not say."""
    request = result.content["about"].get("request", {})
    return request.get("question", "in") == "after", int(request.get("length", sys.maxsize))


def titles_measured(model: str | None, *abouts: Mapping[str, Any]) -> dict[str, str]:
    """Method -> what it is called under the presets with which results were measured (`about` of each), else as
    `data.titles_on`: a part that was trained since does not change what was measured without it."""
    presets = {name: preset for about in abouts for name, preset in (about.get("presets") or {}).items()}
    return data.titles_on(model) | {
        name: table_name(name, [preset]) for name, preset in presets.items() if installed(name)
    }

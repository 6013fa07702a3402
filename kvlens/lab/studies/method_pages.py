"""The generated heads of docs/methods/*.md: family, paper, presets, what is trained, parameters.

Pages keep their written bodies; a method without a page gets one with a head alone. The index lists all methods by
family. kvlens.lab.studies.generated_pages writes them."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.lab.claims.check import statements_of
from kvlens.methods.base import FAMILIES
from kvlens.methods.modelfigures import Calibration
from kvlens.methods.naming import preset_name
from kvlens.runs.request import default_preset

BEGIN, END = "<!-- method: begin -->", "<!-- method: end -->"
MODEL = "smollm2"
"""model whose claims the pages link"""
RESULTS = Path(__file__).parents[1] / "results"
NEEDS = {
    "queries": "the last queries of the prompt, at most",
    "peek": "the last prompt token under full attention",
    "received": "the attention that every prompt token received",
    "inputs": "the inputs of each layer's attention",
    "surprisal": "every prompt token's surprisal",
    "weights": "the attention weights of every step",
    "reading": "an own way to read the prompt",
    "ahead": "an estimated query, one layer ahead",
    "second": "the attention that prompt tokens receive while the prompt is read a second time",
}


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def cell(text: object) -> str:
    """Return a text for one cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def calibration_words(calibration: Calibration) -> str:
    """Return what a calibration measures, the models that it is shipped for, and the command for another model."""
    models = ", ".join(f"`{model}`" for model in calibration.shipped)
    command = calibration.made_by.format(model="MODEL")
    return f"{calibration.kind}: shipped for {models}; else `{command}`, or {calibration.otherwise}"


def head(name: str) -> str:
    """Return the generated part of a method's page."""
    entry, method = methods.entry(name), methods.get(name)
    needs = [
        NEEDS[field.name] + (f" {value:,}" if field.name == "queries" else "")
        for field in fields(method.needs)
        if (value := getattr(method.needs, field.name))
    ]
    presets = [f"`{preset}`: {settings_words(values)}" for preset, values in entry["presets"].items()]
    trained = [calibration_words(calibration) for calibration in method.calibrations] or ["nothing"]
    rows = {
        "name": f"`{name}`",
        "family": entry["family"].replace("_", " "),
        "paper": entry["paper"] or "none",
        "presets": "; ".join(presets) or "none",
        "`fit`": entry["fit"] or "none",
        "trained or calibrated": "; ".join(trained),
        "reads": ", ".join(needs) or "keys and values alone",
        "evidence": evidence(name),
    }
    lines = ["| | |", "| --- | --- |", *(f"| {label} | {cell(text)} |" for label, text in rows.items())]
    return "\n".join([*lines, "", *parameter_table(entry["parameters"])])


def settings_words(values: dict[str, Any]) -> str:
    """Return the parameters that a preset sets, or 'the defaults'."""
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "the defaults"


def parameter_table(parameters: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of parameters; a sentence if there is none."""
    if not parameters:
        return ["The method has no parameters."]
    lines = ["| parameter | default | symbol | decided by | meaning |", "| --- | --- | --- | --- | --- |"]
    for parameter in parameters:
        source = "kvlens" if parameter["ours"] else "paper"
        symbol = f"`{parameter['symbol']}`" if parameter["symbol"] else ""
        cells = (f"`{parameter['name']}`", f"`{parameter['default']}`", symbol, source, parameter["doc"])
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return lines


@cache
def measured_claims() -> frozenset[str]:
    """Return the methods whose papers' claims were measured, of which docs/evidence/claims.md has a section."""
    result = json.loads((RESULTS / f"claims-{MODEL}.json").read_text(encoding="utf-8"))
    return frozenset(result["methods"])


def evidence(name: str) -> str:
    """Return links to what was measured of a method."""
    title = preset_name(name, default_preset(name, MODEL))
    links = ["[quality](../evidence/quality.md)"]
    if statements_of(methods.get(name)) and name in measured_claims():
        links.append(f"[claims of the paper](../evidence/claims.md#{slug(title)})")
    return ", ".join([*links, "[departures](../evidence/departures.md)"])


def index() -> str:
    """Return the generated table of all methods by family."""
    lines = ["| family | method | what it does |", "| --- | --- | --- |"]
    entries = {entry["name"]: entry for entry in methods.catalogue()}
    for family in FAMILIES:
        for name in sorted(name for name, entry in entries.items() if entry["family"] == family):
            link = f"[{entries[name]['title']}]({name}.md)"
            lines.append(f"| {family.replace('_', ' ')} | {link} | {cell(entries[name]['summary'])} |")
    return "\n".join(lines)


def replace_marked(page: str, generated: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with a new generated part between its two marks."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{generated}\n{end}{rest.partition(end)[2]}"


def pages(folder: Path) -> dict[Path, str]:
    """Return the text of every page of the folder; bodies are those on disk."""
    texts = {folder / "index.md": index()} | {
        folder / f"{entry['name']}.md": head(entry["name"]) for entry in methods.catalogue()
    }
    return {path: replace_marked(_present(path), generated) for path, generated in texts.items()}


def _present(path: Path) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    title = "Methods" if path.stem == "index" else methods.entry(path.stem)["title"]
    return f"# {title}\n\n{BEGIN}\n{END}\n"

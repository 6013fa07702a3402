"""Where the benches' result files lie: one per kind and model, side by side, so that pages and docs can show each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens import PACKAGE
from kvlens.cli.options import runs_folder

PLACE = "in kvlens/lab/results of a checkout, else in the folder of runs"
Out = Annotated[Path | None, typer.Option(help=f"JSON file to write; default: {PLACE}, with the model's name in it.")]
Kept = Annotated[
    Path | None,
    typer.Option(help="One line per finished trial, so that a stopped run continues; default: in the folder of runs."),
]


def results_folder() -> Path:
    """Return the folder of results: the checkout's, if the command runs at the top of the checkout that kvlens is
    imported from, else the folder of runs."""
    folder = Path("kvlens/lab/results")
    return folder if folder.is_dir() and folder.samefile(PACKAGE / "lab" / "results") else runs_folder()


def out_file(path: Path | None, kind: str, model: str) -> Path:
    """Return --out, else KIND-MODEL.json in the folder of results, named on stderr. Raises ValueError if no file can be
    there."""
    from kvlens.text.outfile import check_file

    check_file(path, "--out")
    return path or default_file(f"{kind}-{_stem(model)}.json")


def default_file(name: str) -> Path:
    """Return a file in the folder of results, and name it on stderr."""
    path = results_folder() / name
    typer.echo(f"result file: {path}", err=True)
    return path


def kept_file(path: Path | None, kind: str, model: str) -> Path:
    """Return --kept, else KIND-MODEL.jsonl in the folder of runs."""
    return path or runs_folder() / f"{kind}-{_stem(model)}.jsonl"


def write(out: Path, result: dict[str, Any]) -> None:
    """Write the file, in place of an earlier one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def beside(out: Path, kind: str, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """What a page of the docs shows: the fresh result, whatever its file is called, and of those beside it all but the
    ones that it takes the place of: all of whose methods and budgets it has too. Raises ValueError as `results`
    does."""
    return [fresh, *(result for result in results(out.parent, kind) if not _replaced(result, fresh))]


def _replaced(result: dict[str, Any], fresh: dict[str, Any]) -> bool:
    item, counterpart = (
        outcome_rows["about"].get("request", outcome_rows["about"]) for outcome_rows in (result, fresh)
    )
    same = _sort_key(item) == _sort_key(counterpart)
    return same and all(set(item.get(part, ())) <= set(counterpart.get(part, ())) for part in ("budgets", "methods"))


def _sort_key(mapping: dict[str, Any]) -> tuple[Any, ...]:
    """Model, length, place of the question and tasks: what a page has one table of, or several at other budgets."""
    return mapping["model"], mapping["length"], mapping.get("question", "in"), sorted(mapping.get("tasks", ()))


def results(folder: Path, kind: str) -> list[dict[str, Any]]:
    """All result files of a kind in the folder, by name. Raises ValueError with one sentence for one that is not
    JSON."""
    rows = []
    for path in sorted(folder.glob(f"{kind}-*.json")):
        try:
            rows.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            raise ValueError(f"the result file '{path.name}' is not JSON; measure it again.") from None
    return rows


def _stem(model: str) -> str:
    return re.sub(r"[^0-9A-Za-z._]+", "-", model).strip("-")

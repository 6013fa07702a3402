"""What there is: `kvlens.methods`, `kvlens.runs`, `kvlens.table`, `kvlens.sample`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.api.columns import described
from kvlens.api.errors import RequestError, translated, unknown_name
from kvlens.runs.folder import listed_folder

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.text.prompts import PromptText

TOY_TOKENS = 300
"""of the toy model's sample prompt"""


def methods(family: str | None = None) -> pd.DataFrame:
    """Return one row per method that is installed: name, family, title, paper, presets, parameters with their defaults.
    family: the methods of one family alone.

    >>> methods()["name"].head(1).tolist()
    ['full']
    """
    import pandas as pd

    from kvlens.methods import catalogue
    from kvlens.methods.base import FAMILIES

    if family is not None and family not in FAMILIES:
        raise unknown_name("unknown_family", "the family", family, list(FAMILIES))
    rows = [
        {
            "name": entry["name"],
            "title": entry["title"],
            "family": entry["family"],
            "keeps_all": entry["keeps_all"],
            "presets": tuple(entry["presets"]),
            "parameters": {parameter["name"]: parameter["default"] for parameter in entry["parameters"]},
            "summary": entry["summary"],
            "paper": entry["paper"],
        }
        for entry in catalogue()
        if family in (None, entry["family"])
    ]
    return described(pd.DataFrame(rows), "methods")


def runs(
    text: str = "",
    *,
    outcome: str | None = None,
    method: str | None = None,
    model: str | None = None,
    tag: str | None = None,
    runs: str | Path | None = None,
) -> pd.DataFrame:
    """Return the stored runs, newest first, with what came of each.

    Args:
        text: words that are all in the prompt, the answer, the output, the name, the note or the tags.
        outcome: right, wrong, cut_off, lost, diverged, kept, unsound or unknown.
        method, model, tag: runs with this one alone.
        runs: folder; None: $KVLENS_RUNS, else ./runs.

    Raises:
        RequestError: `unknown_outcome`; `folder_missing` for a folder that is named and does not exist.
    """
    from kvlens.lens.listing import Search
    from kvlens.lens.runlist import search_runs
    from kvlens.lens.severity import KINDS

    if outcome is not None and outcome not in KINDS:
        raise unknown_name("unknown_outcome", "the outcome", outcome, list(KINDS))
    with translated():
        frame = search_runs(listed_folder(runs), Search(text, method, model, outcome, tag))
    return described(frame.drop(columns=["about_error"]).reset_index(drop=True), "runs")


def table(name: str, uids: Sequence[str] | None = None, *, runs: str | Path | None = None) -> pd.DataFrame:
    """Return a recorded table of many runs as one frame; each row begins with its run's model, method, parameters,
    budget, prompt and outcome.

    Args:
        name: heads, head-steps, kv-steps, steps, spans, decisions, events, transfers, missed, phases, meta, outcome or
            another table of `kvlens export`.
        uids: the runs; None: all completed runs of the folder.
        runs: their folder; None: $KVLENS_RUNS, else ./runs.
    """
    from kvlens.tables.manyruns import TABLES, table_of_runs

    if name not in TABLES:
        raise unknown_name("unknown_table", "the table", name, list(TABLES))
    with translated():
        folder = listed_folder(runs)
        return table_of_runs(_completed(folder, uids), folder, name)


def retrieval_heads(uids: Sequence[str] | None = None, *, runs: str | Path | None = None) -> pd.DataFrame:
    """Return one row per layer and query head: full KV's mass on the needle over the prompts of many runs of one model,
    its spread, and how often the head is among the top ones; `attrs["correlation"]` says how stable the ranks are.

    Args:
        uids: the runs; None: all completed runs of the folder.
        runs: their folder; None: $KVLENS_RUNS, else ./runs.
    """
    from kvlens.lens.spanreaders import retrieval_heads
    from kvlens.store.reader import TraceReader

    def readers(folder: Path) -> Iterator[TraceReader]:
        for uid in _completed(folder, uids):
            with TraceReader.open(folder, uid) as reader:
                yield reader

    with translated():
        stability = retrieval_heads(readers(listed_folder(runs)))
    frame = described(stability.frame, "retrieval_heads")
    frame.attrs |= {"correlation": stability.correlation, "runs": list(stability.runs)}
    return frame


def _completed(folder: Path, uids: Sequence[str] | None) -> list[str]:
    """Return the runs that were named, or all completed ones. Raises RequestError if there are none."""
    from kvlens.store.catalog import list_runs

    if uids is None:
        frame = list_runs(folder)
        uids = frame.loc[frame["status"] == "completed", "uid"].astype(str).tolist()
    if not uids:
        raise RequestError("bad_value", f"There is no completed run in {folder}.", name="uids", value=[])
    return list(uids)


def sample(model: str | None = None) -> PromptText:
    """Return a prompt with a hidden fact, its question and its answer, to try things on. model: "demo" has a prompt in
    the toy's own language; every other model gets an English text of about a thousand tokens.

    >>> sample("smollm2").answer.strip()
    '48213'
    """
    from kvlens.models.find import DEMO, default_model

    name = default_model() if model is None else model
    if not isinstance(name, str):
        raise RequestError("bad_value", "sample() takes the name of a model.", name="model", value=name)
    if name != DEMO:
        from kvlens.tasks.sample import sample_prompt

        return sample_prompt()
    from kvlens import tasks
    from kvlens.tasks.encoding import encoding

    return tasks.prompt_of(tasks.ask(tasks.get("needle"), TOY_TOKENS, 0.5, 3, encoding(DEMO)))

"""`kvlens.study`: prompts under methods, values of parameters and budgets; `kvlens.studies`: the stored ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvlens.api.asking import BudgetLike, Settings, budget_text, folder_of, listed, method_name, request_fields
from kvlens.api.errors import translated
from kvlens.api.keywordtypes import check_mappings, check_numbers
from kvlens.api.models import Named, source_of
from kvlens.api.storedstudy import Study, carry_out_study, grids_of
from kvlens.api.studyprompts import StudyPromptLike, study_prompts
from kvlens.budget import distinct_budgets
from kvlens.methods.base import Method
from kvlens.runs.folder import listed_folder
from kvlens.runs.request import DEFAULT_SHARE

if TYPE_CHECKING:
    import pandas as pd


def study(
    prompts: StudyPromptLike | Sequence[StudyPromptLike],
    methods: Sequence[str | type[Method]],
    budgets: Sequence[BudgetLike] = (DEFAULT_SHARE,),
    *,
    values: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    presets: Mapping[str, str] | None = None,
    questions: Sequence[str] = ("in",),
    seeds: Sequence[int] = (0,),
    name: str = "",
    segments: Mapping[str, str | tuple[int, int]] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    runs: str | Path | None = None,
    progress: bool = True,
    workers: int = 1,
    ray: str | None = None,
    batch: int = 1,
    **settings: Unpack[Settings],
) -> Study:
    """Run prompts under methods, values of parameters, budgets, forms of the question and seeds. Return the study.

    Full KV runs beside them always. Every trial is a stored run.

    Args:
        prompts: files (.jsonl, .jsonl.gz, .csv, .json, .txt), KIND:PATH of a published benchmark, generated tasks
            ("niah_single@length=1024@prompts=20"), rows ({"question": ..., "context": ..., "answer": ...}), or prompts
            of kvlens; one or several.
        methods: names or classes, one or several.
        budgets: what methods are held to, as for `run`; one or several.
        values: method -> parameter -> the values that it takes: {"METHOD": {"NAME": [0.7, 0.8]}}.
        presets: method -> preset.
        questions: "in", "after" or both.
        seeds: of sampling and of methods that draw; one or several.
        name: the study's name.
        segments: name -> marker or character range, named in every prompt; a prompt without one of them is left out.
        model, tokenizer, device, dtype, runs, progress: as for `run`.
        workers: processes that share the prompts; each loads the model, which must have a name.
        ray: address of a Ray cluster, whose actors take the place of processes.
        batch: prompts whose decode steps are computed together, in one process. Rows of a batch round otherwise than a
            run alone.
        settings: max_new, temperature, ... (kvlens.api.asking.Settings) of all runs. turns: of the prompts that are
            conversations with several user messages.

    Raises:
        RequestError: also for prompts of which not one can be run.
        Interrupted: Ctrl-C was pressed; `kvlens.studies()` lists the study, and its `resume()` goes on.
    """
    from kvlens.runs.races import Entrant
    from kvlens.runs.request import RunRequest
    from kvlens.studies import storage
    from kvlens.studies.models import check_loading
    from kvlens.studies.plan import StudyPlan
    from kvlens.workers.lanes import Crew

    with translated():
        check_numbers("a whole number from 1 on", workers=workers, batch=batch)
        check_mappings("methods to a preset", presets=presets)
        check_mappings("names to a marker or (start, end)", segments=segments)
        crew = Crew(workers, ray, batch)
        models, fields = source_of(model, tokenizer, device, dtype)
        plan = StudyPlan(
            name=name,
            shared=RunRequest(**fields, **request_fields(settings)),
            entrants=tuple(
                Entrant(method=each, preset=(presets or {}).get(each)) for each in map(method_name, listed(methods))
            ),
            values=grids_of(values),
            budgets=distinct_budgets(budget_text(budget) or DEFAULT_SHARE for budget in listed(budgets)),
            questions=tuple(listed(questions)),
            seeds=tuple(listed(seeds)),
        )
        plan.check()
        if isinstance(models, Named):
            check_loading(plan)
        read = study_prompts(prompts, plan.shared, models, segments)
        for sentence in read.faults:
            warnings.warn(f"left out: {sentence}", stacklevel=2)
        folder = folder_of(runs)
        info = storage.create(folder, plan, read.prompts)
    stored = Study(folder, info.id, models)
    carry_out_study(stored, models, progress, crew)
    return stored


def studies(*, runs: str | Path | None = None) -> pd.DataFrame:
    """Return the stored studies, newest first: id, created, name, model, methods, prompts, ended, planned, running.
    Raises RequestError `folder_missing` for a folder that is named and does not exist."""
    import pandas as pd

    from kvlens.studies.catalogue import StudyRow, studies_in

    with translated():
        rows = [vars(row) for row in studies_in(listed_folder(runs))]
    return pd.DataFrame(rows, columns=list(StudyRow.__dataclass_fields__))

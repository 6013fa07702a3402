"""A stored study: its tables, its runs, and more of it."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.api.asking import BudgetLike, budget_text, listed
from kvlens.api.carrying import carrying
from kvlens.api.columns import described
from kvlens.api.errors import Interrupted, RequestError, translated
from kvlens.api.keywordtypes import check_mappings
from kvlens.api.models import Given, Named
from kvlens.api.storedrun import Run
from kvlens.api.studyprompts import StudyPromptLike, study_prompts

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.studies.paired import Paired
    from kvlens.studies.table import Results
    from kvlens.workers.lanes import Crew


class Study:
    """A stored study. Its tables are read anew at every call, so that one that is running shows what has ended."""

    def __init__(self, folder: Path, study_id: str, models: Named | Given) -> None:
        self.folder = folder
        """folder of the runs"""
        self.id = study_id
        self._models = models

    @property
    def results(self) -> Results:
        """What is stored (kvlens.studies.table)."""
        from kvlens.studies.table import Results

        with translated():
            return Results.read(self.folder, self.id)

    def trials(self) -> pd.DataFrame:
        """Return one row per prompt and arm that has ended, with the arm's settings and the run's figures."""
        return self.results.frame()

    def matrix(self, group: str | None = None) -> pd.DataFrame:
        """Return one row per arm, full KV first. Columns: docs/api.md. group: only prompts of this group."""
        return described(self.results.matrix(group), "study")

    def curve(self, axis: str, figure: str = "right") -> pd.DataFrame:
        """Return a figure along a numeric axis: budget, prompt_tokens or a parameter. One line for whatever else the
        arms differ in, with n and 95 % intervals."""
        with translated():
            return self.results.curve(axis, figure)

    def compare(self, a: str, b: str) -> Paired:
        """Return arm `a` beside arm `b`, by the labels of `matrix()`, on the prompts of both."""
        from kvlens.studies.paired import compare

        with translated():
            return compare(self.results, a, b)

    def beside_paper(self, arm: str) -> pd.DataFrame:
        """Return the settings of an arm beside its paper's: setting, study, paper, state (differs, check: not recorded
        here, ours: the paper is silent, same)."""
        import pandas as pd

        from kvlens.studies.papers import Row, beside_paper

        with translated():
            rows = [vars(row) for row in beside_paper(self.results, arm, self.folder)]
        return pd.DataFrame(rows, columns=list(Row.__dataclass_fields__))

    def gate(self, **limits: float) -> pd.DataFrame:
        """Judge every arm by thresholds, and return one row per arm and threshold: arm, threshold, state, limit, value,
        low, high, n, group, needed, passed, sentence.

        limits: `lost`, `changed`, `kl_mean_nats`, `group_lost` (kvlens.studies.limits); none: those of the study's
        file.
        """
        import pandas as pd

        from kvlens.studies.checks import Check, checks
        from kvlens.studies.errors import BadStudy
        from kvlens.studies.limits import Thresholds

        with translated():
            results = self.results
            thresholds = Thresholds.model_validate(limits) if limits else results.info.thresholds
            if thresholds is None:
                raise BadStudy(
                    "no_threshold", "the study has no thresholds: pass lost, changed, kl_mean_nats or group_lost."
                )
            rows = [
                {**vars(check), "passed": check.passed, "sentence": check.sentence}
                for check in checks(results, thresholds)
            ]
        return pd.DataFrame(rows, columns=[*Check.__dataclass_fields__, "passed", "sentence"])

    def run(self, prompt: str, arm: str) -> Run:
        """Return the run of a trial, by the prompt's id and the arm's label. Raises RequestError `unknown_trial`."""
        frame = self.trials()
        matching_trials = frame[(frame["prompt"] == prompt) & ((frame["label"] == arm) | (frame["arm"] == arm))]
        uids = [uid for uid in matching_trials["uid"] if isinstance(uid, str)]
        if not uids:
            raise RequestError(
                "unknown_trial",
                f"the study has no run of '{prompt}' under '{arm}': see trials().",
                prompt=prompt,
                arm=arm,
            )
        return Run(self.folder, uids[0], self._models)

    def resume(
        self, progress: bool = True, workers: int = 1, ray: str | None = None, batch: int | None = None
    ) -> Study:
        """Run the trials that have not ended. workers, ray, batch: as for `study`; batch: None: as the study was
        carried out last. Raises Interrupted where Ctrl-C stops it again."""
        from kvlens.workers.lanes import resuming_crew

        with translated():
            crew = resuming_crew(workers, ray, batch)
        carry_out_study(self, self._models, progress, crew)
        return self

    def extend(
        self,
        prompts: StudyPromptLike | Sequence[StudyPromptLike] = (),
        budgets: Sequence[BudgetLike] = (),
        values: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
        seeds: Sequence[int] = (),
        progress: bool = True,
        segments: Mapping[str, str | tuple[int, int]] | None = None,
    ) -> Study:
        """Add prompts, budgets, values of parameters that the study varies, and seeds, and run what is new. Arguments:
        as for `study`; segments: named in every added prompt. Raises RequestError `other_methods` where arms that were
        run would change."""
        from kvlens.studies.extension import extend

        with translated():
            plan = self.results.info.plan
            read = study_prompts(prompts, plan.shared, self._models, segments)
            for sentence in read.faults:
                warnings.warn(f"left out: {sentence}", stacklevel=2)
            changes = {
                "entrants": (),
                "values": grids_of(values),
                "budgets": tuple(filter(None, map(budget_text, budgets))),
                "questions": (),
                "seeds": tuple(seeds),
            }
            extend(self.folder, self.id, plan.model_copy(update=changes), read.prompts)
        return self.resume(progress)

    def __repr__(self) -> str:
        results = self.results
        return f"<kvlens.Study {self.id}: {results.ended} of {results.planned} trials>"

    def _repr_html_(self) -> str:
        """The matrix, as notebooks show it."""
        names = ["label", "n", "right", "right_low", "right_high", "kl_mean_nats", "resident_share", "refused"]
        table = self.matrix()[names].to_html(index=False, na_rep="", float_format="{:.3g}".format)
        return f"<p>{html.escape(repr(self))}</p>{table}"


def grids_of(values: Mapping[str, Mapping[str, Sequence[Any]]] | None) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return values of parameters as a plan holds them; one value is a list of one. Raises RequestError `bad_value` for
    what is no mapping."""
    check_mappings("methods to a mapping of parameters to values", values=values)
    check_mappings("parameters to values", **{str(method): grid for method, grid in (values or {}).items()})
    return {
        method: {name: tuple(listed(each)) for name, each in grid.items()} for method, grid in (values or {}).items()
    }


class _Bars:
    """The progress of a study in a terminal or a notebook: a bar that counts trials."""

    def __init__(self, report: Any) -> None:
        self._report = report

    def report(self, phase: str, number: int, total: int) -> None:
        """See kvlens.studies.running.Audience: a run's own phases are not shown."""

    def trial(self, finished: int, total: int, prompt: Any, arm: Any, trial: Any) -> None:
        """See kvlens.studies.running.Audience."""
        self._report("trials", finished, total)


def carry_out_study(stored: Study, models: Named | Given, progress: bool, crew: Crew | None) -> None:
    """Run what a study lacks. Raises Interrupted where Ctrl-C stops it."""
    from kvlens.studies.running import carry_out

    with carrying(models, progress) as job:
        bars = _Bars(job.progress.report)
        whole = carry_out(stored.folder, stored.id, bars, job.cancelled, models, crew)
    if not whole and stored.results.ended < stored.results.planned and job.cancelled():
        raise Interrupted(f"interrupted; what has ended is stored: kvlens.Study {stored.id}, resume() goes on.")

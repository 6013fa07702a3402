"""The study behind a gate: found where it was begun before, else begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlens import __version__, methods
from kvlens.store.errors import TraceError
from kvlens.studies import storage
from kvlens.studies.checks import check_possible
from kvlens.studies.errors import BadStudy
from kvlens.studies.limits import Thresholds
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo


def gate_study(
    runs_dir: Path, plan: StudyPlan, prompts: Sequence[StudyPrompt], thresholds: Thresholds, anew: bool = False
) -> StudyInfo:
    """Return the stored study of a gate, with its thresholds.

    The newest study of the same plan, prompts and version of kvlens is taken; `anew` begins another one.
    Raises BadStudy `no_method`, `no_reference`, `too_few_prompts` or `no_threshold` before anything is stored.
    """
    names = {arm.method for arm in plan.arms()}
    if methods.REFERENCE not in names:
        raise BadStudy("no_reference", "a gate compares with full KV: name methods under [methods], or list full.")
    if names == {methods.REFERENCE}:
        raise BadStudy("no_method", "a gate judges methods beside full KV: name another method.")
    answered = sum(prompt.source.answer is not None for prompt in prompts)
    check_possible(thresholds, len(prompts), answered)
    info = None if anew else _find_stored(runs_dir, plan, prompts)
    if info is None:
        return storage.create(runs_dir, plan, prompts, thresholds)
    if info.thresholds != thresholds:
        with storage.carried_out_alone(runs_dir, info.id):
            info = storage.read(runs_dir, info.id).model_copy(update={"thresholds": thresholds})
            storage.save(runs_dir, info)
    return info


def _find_stored(runs_dir: Path, plan: StudyPlan, prompts: Sequence[StudyPrompt]) -> StudyInfo | None:
    rows = [prompt.row() for prompt in prompts]
    for study_id in storage.ids(runs_dir):
        try:
            info = storage.read(runs_dir, study_id)
            same = info.plan == plan and info.kvlens == __version__
            if same and [prompt.row() for prompt in storage.read_prompts(runs_dir, study_id)] == rows:
                return info
        except TraceError:
            continue
    return None

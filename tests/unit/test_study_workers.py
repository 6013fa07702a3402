"""Workers of a study: the same trials as one, in processes and as actors of Ray, and what a stop leaves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from test_studies import PLAN, Heard

from kvlens.runs.request import ByName
from kvlens.studies import storage
from kvlens.studies.errors import BadStudy
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import carry_out
from kvlens.tasks.encoding import encoding
from kvlens.workers.lanes import Crew, WorkerLost

TIMES = {"ms_per_step"}
"""figures that differ from run to run"""


@pytest.fixture(scope="module")
def prompts() -> tuple[StudyPrompt, ...]:
    return read_prompts(["needle@length=200@prompts=3"], lambda: encoding("demo")).prompts


def figures(runs: Path, study: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(prompt, arm) -> state, message and figures of the trial, without times."""
    rows = {}
    for trial in storage.read_trials(runs, study):
        known = {name: value for name, value in (trial.figures or {}).items() if name not in TIMES}
        rows[trial.prompt, trial.arm] = {"state": trial.state, "message": trial.message, **known}
    return rows


def carried_out(runs: Path, prompts: tuple[StudyPrompt, ...], crew: Crew, most: int = 1000) -> tuple[str, bool]:
    """Begin a study and carry it out -> its id, and whether it is whole."""
    info, heard = storage.create(runs, PLAN, prompts), Heard(most)
    return info.id, carry_out(runs, info.id, heard, heard.stop, crew=crew)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_come_to_the_trials_of_one_and_resume(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    alone, whole = carried_out(tmp_path / "a", prompts, Crew())
    assert whole
    study, whole = carried_out(tmp_path / "b", prompts, Crew(2), most=4)
    assert not whole
    ended = storage.read_trials(tmp_path / "b", study)
    assert 4 <= len(ended) < 21
    heard, info = Heard(), storage.read(tmp_path / "b", study)
    storage.save(tmp_path / "b", info.model_copy(update={"fingerprint": "another"}))
    with pytest.raises(WorkerLost) as problem:
        carry_out(tmp_path / "b", study, Heard(), lambda: False, crew=Crew(2))
    assert problem.value.code == "model_changed"
    storage.save(tmp_path / "b", info)
    assert carry_out(tmp_path / "b", study, heard, lambda: False, crew=Crew(2))
    assert len(heard.trials) == 21 - len(ended)
    assert figures(tmp_path / "b", study) == figures(tmp_path / "a", alone)
    assert storage.read(tmp_path / "b", study).fingerprint == storage.read(tmp_path / "a", alone).fingerprint


class Handed(ByName):
    """Stands for a model object."""

    named = False


def test_workers_need_a_model_with_a_name(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    info = storage.create(tmp_path, PLAN, prompts)
    with pytest.raises(BadStudy) as problem:
        carry_out(tmp_path, info.id, Heard(), lambda: False, Handed(), Crew(2))
    assert problem.value.code == "model_is_object"
    with pytest.raises(ValueError, match="at least one"):
        Crew(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_local_ray_cluster_comes_to_the_trials_of_one(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    import ray  # type: ignore[import-not-found, unused-ignore]

    alone, _ = carried_out(tmp_path / "a", prompts[:2], Crew())
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        address = ray.get_runtime_context().gcs_address
        study, whole = carried_out(tmp_path / "b", prompts[:2], Crew(2, ray=address))
        assert whole
        assert figures(tmp_path / "b", study) == figures(tmp_path / "a", alone)
    finally:
        ray.shutdown()

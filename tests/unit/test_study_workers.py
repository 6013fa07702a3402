"""Workers of a study: the same trials as one, in processes and as actors of Ray, and what a stop leaves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_studies import PLAN, Heard

from kvlens.runs.request import ByName
from kvlens.studies import storage
from kvlens.studies.errors import BadStudy
from kvlens.studies.plan import Arm
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import carry_out
from kvlens.studies.storage import Trial
from kvlens.tasks.encoding import encoding
from kvlens.workers.lanes import Crew, WorkerLost
from kvlens.workers.waiting import WaitingGroups

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


class Killer(Heard):
    """Ends a machine once so many trials have ended."""

    def __init__(self, after: int, kill: Callable[[], None]) -> None:
        super().__init__()
        self._after, self._kill = after, kill

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        super().trial(finished, total, prompt, arm, trial)
        if len(self.trials) == self._after:
            self._kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_trials_of_a_killed_ray_node_are_carried_out_by_the_other_node_and_none_twice(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found, unused-ignore]

    alone, _ = carried_out(tmp_path / "a", prompts, Crew())
    left: list[int] = []
    give_back = WaitingGroups.give_back

    def note(waiting: WaitingGroups, items: Sequence[Any]) -> bool:
        left.append(len(items))
        return give_back(waiting, items)

    monkeypatch.setattr(WaitingGroups, "give_back", note)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address)
        heard = Killer(3, lambda: cluster.remove_node(second, allow_graceful=False))
        info = storage.create(tmp_path / "b", PLAN, prompts)
        assert carry_out(tmp_path / "b", info.id, heard, heard.stop, crew=Crew(2, ray=cluster.address))
        assert len(left) == 1, "one worker died, in the middle of a prompt's trials"
        print(f"the dead worker left {left[0]} of 7 trials of its prompt")
        ended = [(trial.prompt, trial.arm) for trial in storage.read_trials(tmp_path / "b", info.id)]
        assert len(ended) == len(set(ended)) == len(heard.trials) == 21
        assert figures(tmp_path / "b", info.id) == figures(tmp_path / "a", alone)
    finally:
        ray.shutdown()
        cluster.shutdown()

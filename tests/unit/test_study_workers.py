"""Workers of a study: the same trials as one, in processes and as actors of Ray, and what a stop leaves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import raises_code
from test_studies import PLAN, Heard

from kvlens.runs import memory
from kvlens.runs.memory import RunBeyondMemory, memory_need
from kvlens.runs.preflight import Foreseen, foresee
from kvlens.runs.request import ByName
from kvlens.store.reader import TraceReader
from kvlens.studies import storage
from kvlens.studies.batchmemory import check_batch
from kvlens.studies.errors import BadStudy
from kvlens.studies.plan import Arm
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import carry_out
from kvlens.studies.storage import Trial
from kvlens.tasks.encoding import encoding
from kvlens.workers.lanes import BadCrew, Crew, WorkerLost
from kvlens.workers.waiting import WaitingGroups

TIMES = {"ms_per_step", "batched"}
"""figures that differ from run to run, or with the batch"""


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


NEAR = {"kl_mean_nats": 1e-6, "coverage": 1e-4, "regret": 1e-4}
"""figures by name -> how far those of a batch are from those of a prompt alone"""


def assert_near(batch: Any, alone: Any) -> None:
    """Every trial of a batch has the state and the figures of the trial alone, up to rounding."""
    assert batch.keys() == alone.keys()
    for key, row in alone.items():
        assert batch[key].keys() == row.keys()
        for name, value in row.items():
            if isinstance(value, float):
                assert batch[key][name] == pytest.approx(value, rel=1e-4, abs=NEAR.get(name, 1e-6)), (key, name)
            else:
                assert batch[key][name] == value, (key, name)


@pytest.mark.slow
def test_a_batch_comes_to_the_trials_of_one_prompt_at_a_time_and_resumes(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...]
) -> None:
    """A process that ends in the middle of a batch keeps what has ended. The rest is run later, nothing twice."""
    alone, whole = carried_out(tmp_path / "a", prompts, Crew())
    assert whole
    batch, _ = carried_out(tmp_path / "b", prompts, Crew(), most=0)
    script = f"""
import os
from pathlib import Path
from kvlens.studies.running import carry_out
from kvlens.workers.lanes import Crew

class Dying:
    def report(self, phase, number, total): pass
    def trial(self, finished, total, *rest):
        if finished == 4: os._exit(9)

carry_out(Path({str(tmp_path / "b")!r}), {batch!r}, Dying(), lambda: False, crew=Crew(batch=2))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    ended = {(trial.prompt, trial.arm) for trial in storage.read_trials(tmp_path / "b", batch)}
    assert len(ended) == 4
    assert len({prompt for prompt, _ in ended}) == 2
    heard = Heard()
    assert carry_out(tmp_path / "b", batch, heard, lambda: False, crew=Crew(batch=8))
    again = {(prompt, arm.key()) for _, _, prompt, arm, _ in heard.trials}
    assert len(heard.trials) == len(again) == 21 - 4
    assert not ended & again
    rows = storage.read_trials(tmp_path / "b", batch)
    assert len({(row.prompt, row.arm) for row in rows}) == len(rows) == 21
    assert_near(figures(tmp_path / "b", batch), figures(tmp_path / "a", alone))
    sizes: dict[str, int | None] = {}
    for row in rows:
        if row.uid is None:
            continue
        with TraceReader.open(tmp_path / "b", row.uid) as reader:
            sizes[row.uid] = reader.meta.batched
            assert ("ms_per_step" in (row.figures or {})) == (reader.meta.batched is None)
            assert reader.meta.process_peak_bytes is None
            assert reader.phases().empty
            assert reader.self_checks()["passed"].all()
    assert max(size or 0 for size in sizes.values()) == 3


@pytest.mark.slow
def test_a_batch_of_one_prompt_is_a_run_alone(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    alone, _ = carried_out(tmp_path, prompts[:1], Crew())
    batch, whole = carried_out(tmp_path, prompts[:1], Crew(batch=8))
    assert whole
    uids = [[row.uid for row in storage.read_trials(tmp_path, study) if row.uid] for study in (alone, batch)]
    assert uids[0][0] == uids[1][0], "full KV's run is taken"
    with TraceReader.open(tmp_path, uids[1][-1]) as reader:
        assert reader.meta.batched is None
        assert reader.meta.process_peak_bytes
        assert not reader.phases().empty


def test_a_batch_has_one_worker_and_counts_the_memory_of_its_prompts(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = storage.create(tmp_path, PLAN, prompts)
    with raises_code("batch_with_workers", BadCrew):
        carry_out(tmp_path, info.id, Heard(), lambda: False, crew=Crew(2, batch=2))
    need = max(
        memory_need(request, found.sizes).total
        for request in map(PLAN.request, PLAN.arms())
        for prompt in prompts
        if isinstance(found := foresee(request, prompt.source), Foreseen)
    )
    monkeypatch.setattr(memory, "weights_in", lambda folder: None)
    monkeypatch.setattr(memory, "host_bytes", lambda: 2 * need)
    with raises_code("run_beyond_memory", RunBeyondMemory) as caught:
        carry_out(tmp_path, info.id, Heard(), lambda: False, crew=Crew(batch=3))
    assert caught.value.prompts == 3
    check_batch(PLAN, prompts, 2)


@pytest.mark.slow
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

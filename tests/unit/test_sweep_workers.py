"""A sweep's workers: as processes that end with it, as actors of Ray, and what is said when one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_sweep import SMALL

from kvlens.lab.bench.sweep import SweepRequest, sweep
from kvlens.lab.bench.sweep.place import Place
from kvlens.lab.bench.sweep.work import Worker, lanes, trial_name
from kvlens.lab.bench.trials import Trial
from kvlens.workers.lanes import Job, ProcessLane, WorkerLost


def test_ray_actors_run_the_same_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the few calls that are made of Ray: tests/unit/test_study_workers.py has the package."""
    calls: list[Any] = []

    def actor(kind: type) -> Any:
        def made(*arguments: Any) -> Any:
            it = kind(*arguments)
            return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(it, name)) for name in ("key", "run")})

        return SimpleNamespace(remote=made)

    fake = ModuleType("ray")
    fake.init = lambda **options: calls.append(options)  # type: ignore[attr-defined]
    fake.remote = lambda **needs: (calls.append(needs), actor)[1]  # type: ignore[attr-defined]
    fake.get = lambda value: value  # type: ignore[attr-defined]
    fake.kill = lambda handle: calls.append("killed")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    request = SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,), "workers": 2, "ray": "auto"})
    _, rows = sweep(request, tmp_path / "k.jsonl", tmp_path, lambda *told: None)
    assert rows[0]["exact"] == 1.0
    assert calls == [
        {"address": "auto", "ignore_reinit_error": True},
        {"num_cpus": 1},
        {"num_cpus": 1},
        "killed",
        "killed",
    ]


def test_ray_that_is_not_installed_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="package ray is not installed"):
        lanes(SweepRequest(ray="auto"), Place("demo", "cpu", "float32", {}, None))


@pytest.mark.slow
def test_a_worker_process_ignores_control_c_and_its_death_is_said() -> None:
    lane = ProcessLane(Job(Worker, Place("demo", "cpu", "float32", {"full": "x"}, None), trial_name))
    trial = Trial("needle", 256, 0.5, 1, 0, "full", "")
    key = lane.key(trial)
    pid = lane._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert lane.key(trial) == key
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"ended with code -9 in trial needle 256 tokens depth 0.5 #0, full no limit"):
        lane.run(trial)
    lane.close()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
def test_killed_with_workers_it_goes_on_where_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "k.jsonl"
    argv = [
        sys.executable,
        "-m",
        "kvlens",
        "bench",
        "sweep",
        "--no-traces",
        "--workers",
        "2",
        "--methods",
        "full,streaming_llm",
        "--budgets",
        "20%",
        "--lengths",
        "256",
        "--depths",
        "0.2,0.8",
        "--prompts",
        "40",
        "--kept",
        str(kept),
        "--out",
        str(tmp_path / "g.json"),
    ]
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[2]
    )
    until = time.monotonic() + 480
    while time.monotonic() < until and not (kept.exists() and len(kept.read_text().splitlines()) >= 4):
        time.sleep(0.02)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = kept.read_text().split("\n")
    before = [json.loads(line) for line in lines[:-1]]
    assert 4 <= len(before) < 240, "it was killed in the middle"
    for pid in workers:
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(pid), "a worker outlived the sweep"
    request = SweepRequest(**SMALL | {"prompts": 3})
    ran: list[str] = []
    _, rows = sweep(request, kept, tmp_path, lambda done, total, row: ran.append(row["key"]))
    assert len(rows) == 18
    assert not set(ran) & {row["key"] for row in before}
    assert len(ran) == 18 - sum(row["index"] < 3 for row in before)

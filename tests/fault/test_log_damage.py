"""A damaged write-ahead log of an interrupted run: what was committed before the damage is kept, and what was lost is
said."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from store_support import one_sentence

from kvlens.store import walmend
from kvlens.store.errors import UnreadableRun
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import recover

ROOT = Path(__file__).parents[2]
UID = "killed-run"
STEPS = 96
#: Writes blocks of 8 steps and dies when all are committed; DuckDB folds nothing into the file on the way.
DIE = """
import os, sys
from pathlib import Path
from tests.synthetic import write_synthetic
from kvlens.store.writer import TraceWriter
class Dies(TraceWriter):
    def __init__(self, folder, uid, level): super().__init__(folder, uid, level, block_steps=8)
    def finish(self, *arguments):
        self._flusher.stop()
        self._write_info()
        os._exit(9)
write_synthetic(Path(sys.argv[1]), 2, 4, 2, steps=int(sys.argv[3]), spans=12, uid=sys.argv[2], writer_class=Dies)
"""


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("died")
    subprocess.run([sys.executable, "-c", DIE, str(folder), UID, str(STEPS)], cwd=ROOT, check=False, timeout=600)
    assert (folder / UID / "trace.duckdb.wal").stat().st_size > 10_000
    return folder


def damaged(died: Path, to: Path, kind: str, share: float, seed: int = 0) -> Path:
    """A copy of the run with its log damaged at a share of its length."""
    shutil.copytree(died, to)
    wal = to / UID / "trace.duckdb.wal"
    data = bytearray(wal.read_bytes())
    at = int(share * len(data))
    if kind == "flip":
        data[at] ^= 1 << random.Random(seed).randrange(8)
    elif kind == "zeroed tail":
        data[at:] = bytes(len(data) - at)
    elif kind == "zeroed page":
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    else:
        del data[at:]
    wal.write_bytes(data)
    return to


@pytest.mark.parametrize("kind", ["flip", "zeroed tail", "zeroed page", "truncated"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_what_was_committed_before_the_damage_is_kept(died: Path, tmp_path: Path, kind: str, share: float) -> None:
    runs = damaged(died, tmp_path / "runs", kind, share)
    made = recover(runs, UID)
    least = int(share * STEPS) - 16  # blocks are of 8 steps and of nearly equal size
    assert least <= made.steps < STEPS
    assert made.steps % 8 == 0
    assert made.lost is not None
    assert f"{STEPS - made.steps} of its " in made.lost
    with TraceReader.open(runs, UID) as reader:
        assert reader.n_steps == made.steps == len(reader.steps())
        assert reader.self_checks()["passed"].all()
        assert made.lost in str(reader.error)
        table = reader.head_table()
        assert (table["n_steps"] == made.steps).all()
    row = list_runs(runs).iloc[0]
    assert (row["status"], row["steps"]) == ("interrupted", made.steps)
    assert not (runs / UID / ".recover").exists()


def test_a_damaged_log_stays_beside_the_run(died: Path, tmp_path: Path) -> None:
    runs = damaged(died, tmp_path / "runs", "flip", 0.5)
    before = (runs / UID / "trace.duckdb.wal").read_bytes()
    assert walmend.KEPT in str(recover(runs, UID).lost)
    assert (runs / UID / walmend.KEPT).read_bytes() == before


def test_a_log_whose_beginning_is_damaged_leaves_the_run_openable_and_is_kept(died: Path, tmp_path: Path) -> None:
    runs = damaged(died, tmp_path / "runs", "zeroed page", 0.0)
    before = (runs / UID / "trace.duckdb.wal").read_bytes()
    made = recover(runs, UID)
    assert made.lost is not None
    with TraceReader.open(runs, UID) as reader:
        assert (reader.n_steps, reader.meta.q_heads) == (made.steps, 4)
    assert (runs / UID / walmend.KEPT).read_bytes() == before


def test_reading_a_run_with_a_damaged_log_points_to_recovery(died: Path, tmp_path: Path) -> None:
    runs = damaged(died, tmp_path / "runs", "flip", 0.5)
    with pytest.raises(UnreadableRun, match=f"kvlens runs recover {UID}") as caught:
        TraceReader.open(runs, UID)
    one_sentence(caught.value)
    assert "delete" not in str(caught.value)


def test_a_whole_log_loses_nothing(died: Path, tmp_path: Path) -> None:
    shutil.copytree(died, tmp_path / "runs")
    made = recover(tmp_path / "runs", UID)
    assert (made.steps, made.lost) == (STEPS, None)
    assert not (tmp_path / "runs" / UID / walmend.KEPT).exists()
    assert "Damage" not in json.loads((tmp_path / "runs" / UID / "run.json").read_text())["error"]

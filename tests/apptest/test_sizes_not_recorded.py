"""Pages of a run whose trace lacks the sizes of its model and prompt, or the KL of its loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pytest
from test_pages import words
from uiruns import Runs, Visit

from kvlens.app.report import report_bytes
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

PAGES = ("replay", "heads", "spans", "memory", "method", "compare", "")
HELD = {"span": 3, "tok_start": 20, "tok_end": 30, "heads": [[0, 1]], "from_step": 2}


@pytest.fixture(scope="module")
def bare(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a what-if whose meta lacks every size that a trace may lack, and the run's id."""
    folder = tmp_path_factory.mktemp("bare-runs")
    shutil.copytree(runs.folder / runs.cancelled, folder / runs.cancelled)
    uid = write_synthetic(folder, 2, 4, 2, 6, 8, uid="20260102-000000-nosize", prompt_tokens=300, hold=[HELD])
    trace = folder / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute(
            "DELETE FROM meta WHERE key IN "
            "('prompt_tokens', 'head_dim', 'token_bytes', 'full_kv_bytes', 'max_new', 'seed', 'budget_bytes')"
        )
    return folder, uid


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_a_run_without_sizes(visit: Visit, bare: tuple[Path, str], page: str) -> None:
    folder, uid = bare
    app = visit(folder, page, run=uid, step=1)
    assert not app.error, [box.value for box in app.error]


def test_the_report_counts_the_prompts_tokens(bare: tuple[Path, str]) -> None:
    with TraceReader.open(*bare) as reader:
        assert b"<td>300 tokens, task synthetic</td>" in report_bytes(reader)


def test_replay_counts_the_prompts_tokens(visit: Visit, bare: tuple[Path, str]) -> None:
    folder, uid = bare
    assert "300 prompt tokens" in words(visit(folder, "replay", run=uid))


def test_spans_names_the_size_that_no_segmenter_can_do_without(visit: Visit, bare: tuple[Path, str]) -> None:
    folder, uid = bare
    app = visit(folder, "spans", run=uid)
    assert any(f"run {uid} does not record head_dim" in box.value.replace("\\", "") for box in app.info)
    assert not app.slider


def test_memory_leaves_the_held_bytes_out(visit: Visit, bare: tuple[Path, str]) -> None:
    folder, uid = bare
    text = words(visit(folder, "memory", run=uid))
    assert "10 tokens are held" in text
    assert "budget, not recorded" in text


def test_a_run_that_lost_nothing_and_has_no_kl_is_shown(visit: Visit, tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 6, 8, uid="20260102-000001-nokl")
    trace = tmp_path / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("UPDATE loss SET agrees = true, kl = NULL")
    app = visit(tmp_path, "replay", run=uid)
    assert not app.error, [box.value for box in app.error]
    assert "Nothing was lost" in words(app)

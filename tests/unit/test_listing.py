"""What is kept of the runs of a list: read once, again when a run or the rules change, and never trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lensruns import STEP, LensRuns, write_lens_runs

from kvlens.lens import listing
from kvlens.lens.listing import FILE, Listing, Search, Told, budget_of, limit_in
from kvlens.store.catalog import list_runs
from kvlens.store.lease import Lease
from tests.synthetic import write_synthetic


@pytest.fixture
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    """Runs of the test's own: what was read of them is kept beside them."""
    return write_lens_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose traces are opened."""
    found: list[str] = []
    real = listing._told

    def told(folder: Path, uid: str, stamp: int) -> Told:
        found.append(uid)
        return real(folder, uid, stamp)

    monkeypatch.setattr(listing, "_told", told)
    return found


def test_a_trace_is_read_once_and_kept_for_the_next_process(lens: LensRuns, opened: list[str]) -> None:
    uids = [lens.lost, lens.kept, lens.plain]
    first = Listing(lens.folder).of(uids)
    assert opened == uids
    assert Listing(lens.folder).of(uids) == first
    assert opened == uids
    lost, kept, plain = first
    assert lost is not None
    assert kept is not None
    assert plain is not None
    assert (lost.outcome.words, lost.outcome.lost_at, lost.outcome.expected) == ("other token", STEP, "4172")
    assert [one.outcome.kinds for one in (lost, kept, plain)] == [("lost",), ("kept",), ("unknown",)]
    assert lost.prompt == kept.prompt is not None
    assert lost.begins
    os.utime(lens.folder / lens.lost / "trace.duckdb", ns=(1, 1))
    assert Listing(lens.folder).of(uids)[1:] == first[1:]
    assert opened == [*uids, lens.lost], "a trace that changed is read again"


def test_a_list_says_what_a_run_was_held_to_be_it_a_budget_or_not(tmp_path: Path) -> None:
    """A method that keeps every token has no budget; its parameters say how many it attends."""
    meta = {"method": "quest", "budget": "1.0", "budget_bytes": None}
    uids = [
        write_synthetic(tmp_path, 2, 4, 2, 4, 8, seed=3, prompt_tokens=100, **meta, config=config)  # type: ignore[arg-type]
        for config in ({"keep": 0.25, "tokens": 64}, {"keep": 0.0, "tokens": 64}, {})
    ]
    uids.append(write_synthetic(tmp_path, 2, 4, 2, 4, 8, seed=3, prompt_tokens=100))
    rows = list_runs(tmp_path).set_index("uid").loc[uids].reset_index().to_dict("records")
    told = Listing(tmp_path).of(uids)
    words = [limit_in(row, one) for row, one in zip(rows, told, strict=True)]
    assert words == ["25% of attended tokens", "64 attended tokens", "no limit", budget_of(rows[-1])]
    assert limit_in(rows[0], None) == budget_of(rows[0]), "of a trace that was not read yet"


@pytest.mark.parametrize("spoil", ["not json", "{}", "other rules", "a link"])
def test_a_file_that_cannot_be_used_is_made_again(lens: LensRuns, opened: list[str], spoil: str) -> None:
    first = Listing(lens.folder).of([lens.kept])
    opened.clear()
    path = lens.folder / FILE
    if spoil == "other rules":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rules": "those of another version"}))
    elif spoil == "a link":
        path.unlink()
        path.symlink_to("/etc/passwd")
    else:
        path.write_text(spoil)
    assert Listing(lens.folder).of([lens.kept]) == first
    assert opened == [lens.kept]
    assert not path.is_symlink()


def test_no_time_reads_nothing_and_what_is_written_now_is_asked_again(tmp_path: Path, opened: list[str]) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80)
    known = Listing(tmp_path)
    assert known.of([uid], 0.0) == [None]
    with Lease(tmp_path / uid):
        (busy,) = known.of([uid])
    assert busy is not None
    assert busy.outcome.words == ""
    assert not (tmp_path / FILE).exists()
    (told,) = known.of([uid])
    assert told is not None
    assert told.outcome.words == "other token"
    (absent,) = known.of(["20990101-000000-absent"])
    assert absent is not None
    assert absent.outcome.kinds == ("unknown",)


def test_an_answer_that_full_kv_did_not_give_is_not_among_what_was_lost(tmp_path: Path) -> None:
    known = {"prompt_tokens": 80, "answer": "58214", "output_text": "9999"}
    said = {
        full: write_synthetic(tmp_path, 2, 4, 2, 4, 8, reference_output=full, **known)  # type: ignore[arg-type]
        for full in ("1951", "58214", None)
    }
    rows = {row["uid"]: row for row in list_runs(tmp_path).to_dict("records")}
    told = dict(zip(said.values(), Listing(tmp_path).of(list(said.values())), strict=True))
    found = {
        kind: {full for full, uid in said.items() if Search(outcome=kind).takes(rows[uid], told[uid])}
        for kind in ("lost", "diverged", "wrong")
    }
    assert found == {"lost": {"58214", None}, "diverged": {"1951"}, "wrong": {"1951", "58214", None}}


def test_runs_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80)
    Listing(tmp_path).of([uid, "20990101-000000-absent"])
    assert list(json.loads((tmp_path / FILE).read_text())["runs"]) == [uid]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    (lens.folder / FILE).unlink(missing_ok=True)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(listing, "write_plain", refused)
    (told,) = Listing(lens.folder).of([lens.lost])
    assert told is not None
    assert told.outcome.lost_at == STEP
    assert not (lens.folder / FILE).exists()


def test_all_words_are_looked_for_everywhere(lens: LensRuns) -> None:
    rows = {row["uid"]: row for row in list_runs(lens.folder).to_dict("records")}
    (told,) = Listing(lens.folder).of([lens.lost])
    row = rows[lens.lost] | {"name": "The Port", "tags": ("to show",), "model": "/some/where/small"}
    assert told is not None
    for wanted in (
        Search(),
        Search(f"port SHOW 4172 {lens.lost} {told.begins.split()[0]} {told.ends.split()[-1]}"),
        Search(model="small", tag="to show", outcome="lost", method=row["method"]),
        Search(model="/some/where/small"),
    ):
        assert wanted.takes(row, told)
    for wanted in (Search("port zebra"), Search(model="where"), Search(tag="show"), Search(outcome="right")):
        assert not wanted.takes(row, told)
    assert not Search(outcome="unknown").takes(row, None), "what was not read has no outcome"
    with pytest.raises(ValueError, match="'good' is no outcome; there are right"):
        Search(outcome="good").check()

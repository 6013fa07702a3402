"""What is kept of the runs of a list: read once, again when a run changes, and never trusted."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lensruns import STEP, LensRuns, forget_runs, without_facts, write_lens_runs
from support import raises_code

from kvlens.lens import listing, runlist
from kvlens.lens.listing import Listing, Search, budget_of, limit_in, told_of
from kvlens.lens.runlist import search_runs
from kvlens.lens.severity import outcome
from kvlens.store import catalog, runcatalogue
from kvlens.store.about import About, write_about
from kvlens.store.catalog import list_runs
from kvlens.store.outcomefacts import OutcomeFacts
from kvlens.store.reader import TraceReader
from kvlens.store.runcatalogue import FILE
from kvlens.store.runinfo import Lease
from tests.synthetic import write_synthetic


@pytest.fixture
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    """Runs of the test's own: what was read of them is kept beside them."""
    return write_lens_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose traces are opened."""
    found: list[str] = []
    real = listing.read_trace

    def read(folder: Path, uid: str) -> OutcomeFacts:
        found.append(uid)
        return real(folder, uid)

    monkeypatch.setattr(listing, "read_trace", read)
    return found


def _lines(folder: Path) -> list[str]:
    """The run ids of the catalogue's lines."""
    return [json.loads(line)["uid"] for line in (folder / FILE).read_text().splitlines() if line]


def test_no_trace_of_a_finished_run_is_opened_to_list_it(lens: LensRuns, opened: list[str]) -> None:
    uids = [lens.lost, lens.kept, lens.plain]
    by_facts = Listing(lens.folder).read(uids)
    assert opened == []
    without_facts(lens.folder, *uids)
    assert Listing(lens.folder).read(uids) == by_facts
    assert opened == uids


def test_the_facts_of_a_run_give_the_outcome_of_its_trace(lens: LensRuns) -> None:
    for uid in (lens.lost, lens.kept, lens.plain):
        (told,) = Listing(lens.folder).read([uid])
        with TraceReader.open(lens.folder, uid) as reader:
            assert told is not None
            assert outcome(reader) == told.outcome
            assert told_of(reader.outcome_facts(), "") == told


def test_a_trace_is_read_once_and_kept_for_the_next_process(lens: LensRuns, opened: list[str]) -> None:
    uids = [lens.lost, lens.kept, lens.plain]
    without_facts(lens.folder, *uids)
    first = Listing(lens.folder).read(uids)
    assert opened == uids
    forget_runs()
    assert Listing(lens.folder).read(uids) == first
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
    assert Listing(lens.folder).read(uids)[1:] == first[1:]
    assert opened == [*uids, lens.lost], "a trace that changed is read again"


def test_a_killed_list_loses_nothing_that_it_read(
    lens: LensRuns, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = [lens.lost, lens.kept, lens.plain]
    without_facts(lens.folder, *uids)
    real, count = listing.read_trace, iter(range(10))

    def killed(folder: Path, uid: str) -> OutcomeFacts:
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(folder, uid)

    monkeypatch.setattr(listing, "read_trace", killed)
    with pytest.raises(KeyboardInterrupt):
        Listing(lens.folder).read(uids)
    with open(lens.folder / FILE, "ab") as file:
        file.write(b'{"v":1,"uid":"half a li')
    forget_runs()
    opened.clear()
    monkeypatch.setattr(listing, "read_trace", real)
    assert all(told is not None and told.begins for told in Listing(lens.folder).read(uids))
    assert opened == uids[2:]
    forget_runs()
    assert Listing(lens.folder).read(uids)
    assert opened == uids[2:], "a line after half a line is read"


def test_garbage_is_looked_for_while_traces_are_opened_alone(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    uids, looks = [lens.lost, lens.kept], dict[str, set[bool]]()
    without_facts(lens.folder, lens.kept)

    for owner, name in ((listing, "read_trace"), (Listing, "_told"), (runlist, "records")):
        real = getattr(owner, name)

        def noted(*arguments: Any, _real: Any = real, _name: str = name) -> Any:
            looks.setdefault(_name, set()).add(gc.isenabled())
            return _real(*arguments)

        monkeypatch.setattr(owner, name, noted)
    assert set(search_runs(lens.folder, Search())["uid"]) >= set(uids)
    assert looks == {"read_trace": {True}, "_told": {False}, "records": {False}}
    assert gc.isenabled()


def test_only_what_is_new_is_read_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By count: run.json of each run once, also by the next process; of a run that was added, renamed or ended anew."""
    read: list[str] = []
    real = catalog.read_info

    def read_info(folder: Path) -> dict[str, Any]:
        read.append(folder.name)
        return real(folder)

    monkeypatch.setattr(catalog, "read_info", read_info)
    uids = [write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80, uid=f"20260101-00000{k}-aaaa") for k in range(3)]
    first = search_runs(tmp_path, Search())
    assert sorted(read) == uids
    forget_runs()
    again = search_runs(tmp_path, Search())
    assert sorted(read) == uids
    assert again.to_json() == first.to_json()
    uids.append(write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80, uid="20260101-000004-aaaa"))
    write_about(tmp_path, uids[0], About(name="The port"))
    listed = search_runs(tmp_path, Search()).set_index("uid")
    assert sorted(read[3:]) == [uids[0], uids[3]]
    assert listed["name"][uids[0]] == "The port"
    assert len(_lines(tmp_path)) == 5
    shutil.rmtree(tmp_path / uids[1])
    assert sorted(search_runs(tmp_path, Search())["uid"]) == [uids[0], *uids[2:]]
    assert len(read) == 5


def test_a_catalogue_of_many_changes_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runcatalogue, "_BATCH", 4)
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80)
    for number in range(12):
        write_about(tmp_path, uid, About(note="n" * number))
        assert list_runs(tmp_path)["note"][0] == "n" * number
    assert len(_lines(tmp_path)) <= 7
    forget_runs()
    assert list_runs(tmp_path)["note"][0] == "n" * 11


def test_a_list_says_what_a_run_was_held_to_be_it_a_budget_or_not(tmp_path: Path) -> None:
    """A method that keeps every token has no budget; its parameters say how many it attends."""
    meta = {"method": "quest", "budget": "1.0", "budget_bytes": None}
    uids = [
        write_synthetic(tmp_path, 2, 4, 2, 4, 8, seed=3, prompt_tokens=100, **meta, config=config)  # type: ignore[arg-type]
        for config in ({"keep": 0.25, "tokens": 64}, {"keep": 0.0, "tokens": 64}, {})
    ]
    uids.append(write_synthetic(tmp_path, 2, 4, 2, 4, 8, seed=3, prompt_tokens=100))
    rows = list_runs(tmp_path).set_index("uid").loc[uids].reset_index().to_dict("records")
    told = Listing(tmp_path).read(uids)
    words = [limit_in(row, one) for row, one in zip(rows, told, strict=True)]
    assert words == ["25% of attended tokens", "64 attended tokens", "no limit", budget_of(rows[-1])]
    assert limit_in(rows[0], None) == budget_of(rows[0]), "of a trace that was not read yet"


@pytest.mark.parametrize("spoil", ["not json", "{}", "other form", "other row", "no status", "a link"])
def test_a_file_that_cannot_be_used_is_made_again(lens: LensRuns, opened: list[str], spoil: str) -> None:
    without_facts(lens.folder, lens.kept)
    first = Listing(lens.folder).read([lens.kept])
    opened.clear()
    path = lens.folder / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    if spoil == "other form":
        path.write_text("".join(json.dumps(line | {"v": 0}) + "\n" for line in lines))
    elif spoil == "other row":
        path.write_text("".join(json.dumps(line | {"row": line["row"] | {"model": 7}}) + "\n" for line in lines))
    elif spoil == "no status":
        for line in lines:
            del line["row"]["status"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif spoil == "a link":
        path.unlink()
        path.symlink_to("/etc/passwd")
    else:
        path.write_text(spoil)
    forget_runs()
    assert Listing(lens.folder).read([lens.kept]) == first
    assert opened == [lens.kept]
    assert lens.kept in set(list_runs(lens.folder)["uid"])
    assert not path.is_symlink()


def test_what_could_not_be_read_is_asked_again_by_the_next_process(lens: LensRuns, opened: list[str]) -> None:
    without_facts(lens.folder, lens.kept)
    run, trace = lens.folder / "20260101-000000-aaaaaa", lens.folder / lens.kept / "trace.duckdb"
    whole = trace.read_bytes()
    trace.write_bytes(b"x" * len(whole))
    run.mkdir()
    (run / "run.json").write_text("no JSON")
    for _ in range(2):
        (told,) = Listing(lens.folder).read([lens.kept])
        assert told is not None
        assert told.problem
        assert set(list_runs(lens.folder).query("status == 'unreadable'")["uid"]) == {run.name}
    assert opened == [lens.kept], "a process asks once"
    assert run.name not in _lines(lens.folder)
    forget_runs()
    assert Listing(lens.folder).read([lens.kept]) == [told]
    assert opened == [lens.kept] * 2


def test_no_time_reads_nothing_and_what_is_written_now_is_asked_again(tmp_path: Path, opened: list[str]) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 8, prompt_tokens=80)
    without_facts(tmp_path, uid)
    known = Listing(tmp_path)
    assert known.read([uid], 0.0) == [None]
    with Lease(tmp_path / uid):
        (busy,) = known.read([uid])
    assert busy is not None
    assert busy.outcome.words == ""
    (told,) = known.read([uid])
    assert told is not None
    assert told.outcome.words == "other token"
    (absent,) = known.read(["20990101-000000-absent"])
    assert absent is not None
    assert absent.outcome.kinds == ("unknown",)


def test_an_answer_that_full_kv_did_not_give_is_not_among_what_was_lost(tmp_path: Path) -> None:
    known = {"prompt_tokens": 80, "answer": "58214", "output_text": "9999"}
    said = {
        full: write_synthetic(tmp_path, 2, 4, 2, 4, 8, reference_output=full, **known)  # type: ignore[arg-type]
        for full in ("1951", "58214", None)
    }
    rows = {row["uid"]: row for row in list_runs(tmp_path).to_dict("records")}
    told = dict(zip(said.values(), Listing(tmp_path).read(list(said.values())), strict=True))
    found = {
        kind: {full for full, uid in said.items() if Search(outcome=kind).takes(rows[uid], told[uid])}
        for kind in ("lost", "diverged", "wrong")
    }
    assert found == {"lost": {"58214", None}, "diverged": {"1951"}, "wrong": {"1951", "58214", None}}


def test_a_folder_that_cannot_be_written_is_read_all_the_same(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    without_facts(lens.folder, lens.lost)
    real = os.open

    def refused(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(FILE):
            raise PermissionError
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(runcatalogue.os, "open", refused)
    (told,) = Listing(lens.folder).read([lens.lost])
    assert told is not None
    assert told.outcome.lost_at == STEP
    assert not (lens.folder / FILE).exists()


def test_all_words_are_looked_for_everywhere(lens: LensRuns) -> None:
    rows = {row["uid"]: row for row in list_runs(lens.folder).to_dict("records")}
    (told,) = Listing(lens.folder).read([lens.lost])
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
    with raises_code("unknown_outcome", outcome="good"):
        Search(outcome="good").check()

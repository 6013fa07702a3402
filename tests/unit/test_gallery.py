"""The gallery of recorded losses: every one opens in this version and is what its index says."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from support import raises_code

from kvlens import methods, tasks
from kvlens.app import gallery
from kvlens.lens.severity import outcome
from kvlens.models.find import SMOLLM2
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader, list_runs

MOST_BYTES = 7_000_000
LOSSES = gallery.losses()


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs into which every loss was brought."""
    folder = tmp_path_factory.mktemp("gallery") / "runs"
    for loss in LOSSES:
        assert gallery.bring(loss, folder) == loss.uid
    return folder


def test_one_loss_per_method_on_the_real_model_within_seven_megabytes() -> None:
    names = [loss.method for loss in LOSSES]
    assert len(names) >= 8
    assert len(set(names)) == len(names)
    assert set(names) <= set(methods.BUILT_IN)
    assert {loss.model for loss in LOSSES} == {SMOLLM2}
    files = {path.name: path.stat().st_size for path in gallery.FOLDER.glob("*.tar.xz")}
    assert files == {loss.file: loss.bytes for loss in LOSSES}
    assert sum(files.values()) + gallery.INDEX.stat().st_size <= MOST_BYTES


def test_nothing_but_the_runs_is_left_in_the_folder(brought: Path) -> None:
    uids = {uid for loss in LOSSES for uid in (loss.uid, loss.held.uid)}
    assert {path.name for path in brought.iterdir()} == uids
    assert set(list_runs(brought)["uid"]) == uids


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.method)
def test_a_recorded_loss_is_what_the_index_says(loss: gallery.Loss, brought: Path) -> None:
    with TraceReader.open(brought, loss.uid) as reader:
        meta = reader.meta
        assert (reader.status, meta.method, meta.model, meta.preset) == (
            "completed",
            loss.method,
            loss.model,
            loss.preset,
        )
        assert reader.self_checks()["passed"].all()
        assert gallery.spoken(reader) == (loss.verdict, loss.why)
        assert str(meta.output_text).strip().partition("\n")[0] == loss.came
        assert not tasks.is_right(loss.task, loss.expected, str(meta.output_text))
        assert outcome(reader).right is False
        assert str(meta.answer).strip() == loss.expected
        assert loss.question in reader.prompt_text()
        assert (meta.prompt_tokens, meta.full_kv_bytes) == (loss.prompt_tokens, loss.full_kv_bytes)
        assert len(reader.triples(int(reader.loss()["step"].max())))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.method)
def test_what_holding_gave_back_is_what_the_index_says(loss: gallery.Loss, brought: Path) -> None:
    with TraceReader.open(brought, loss.held.uid) as reader:
        said = reader.meta.whatif
        assert reader.meta.parent == loss.uid
        assert said is not None
        assert reader.self_checks()["passed"].all()
        assert (said.restored, said.held_bytes) == (loss.held.restored, loss.held.bytes)
        assert str(said.answer_after).strip().partition("\n")[0] == loss.held.answer
        assert (said.kl_before, said.kl_after) == (loss.held.kl_before, loss.held.kl_after)
        assert tasks.is_right(loss.task, loss.expected, str(said.answer_after)) is loss.held.restored


def test_the_page_quotes_every_loss_as_it_is() -> None:
    from benchmarks.gallery_page import DOC, with_losses

    page = DOC.read_text(encoding="utf-8")
    assert with_losses(page) == page, "run: python -m benchmarks.gallery --doc"
    for loss in LOSSES:
        assert loss.verdict in page
        assert loss.held.sentence(loss.full_kv_bytes) in page
    with pytest.raises(ValueError, match="sekv"):
        with_losses("another page")


def test_a_loss_that_is_there_is_left_as_it_is(brought: Path) -> None:
    before = (brought / LOSSES[0].uid / "run.json").stat().st_mtime_ns
    assert gallery.bring(LOSSES[0], brought) == LOSSES[0].uid
    assert (brought / LOSSES[0].uid / "run.json").stat().st_mtime_ns == before
    assert gallery.loss_of(LOSSES[0].uid) is LOSSES[0]
    assert gallery.loss_of("20260101-000000-other") is None


def test_half_of_a_loss_is_made_whole(tmp_path: Path) -> None:
    loss = LOSSES[-1]
    gallery.bring(loss, tmp_path)
    shutil.rmtree(tmp_path / loss.held.uid)
    gallery.bring(loss, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {loss.uid, loss.held.uid}


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LOSSES[-1]
    data = (gallery.FOLDER / loss.file).read_bytes()
    assert hashlib.sha256(data).hexdigest() == loss.sha256
    (tmp_path / loss.file).write_bytes(data[:-1])
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    with raises_code("gallery_changed", TraceError, file=loss.file):
        gallery.bring(loss, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()

"""Surprisals of the prompt: computed when somebody asks, and stored when the last step has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import save
from support import ListSink, preset_of, raises_code, random_llama, random_prompt, run, share_of

from kvlens.engine import prefill
from kvlens.engine.engine import Cancelled, Engine
from kvlens.engine.prefill import Surprisals
from kvlens.runs import preparing
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.shortage import shortage
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

TEXT = "The farmer carried the copper kettle to the old harbor. " * 40
Cancel = Callable[[list[str]], bool]


def ran(folder: Path, method: str = "snapkv", cancel: Cancel = lambda told: False) -> tuple[TraceReader, list[str]]:
    """A stored run, and the phases it reported. cancel: asked with those that it has reported."""
    told: list[str] = []
    uid, _, _ = carry_out(
        RunRequest(model="demo", method=method, budget="40%", max_new=4, ignore_eos=True, prefill_chunk=64),
        PromptText(TEXT),
        folder,
        lambda phase, done, total: told.append(phase),
        lambda: cancel(told),
    )
    return TraceReader.open(folder, uid), told


def stored(reader: TraceReader) -> np.ndarray:
    """Of the prompt's tokens, NaN: not recorded."""
    tokens = reader.tokens()
    assert tokens[tokens["step"].notna()]["surprisal"].isna().all()
    return tokens[tokens["step"].isna()].sort_values("pos")["surprisal"].to_numpy(np.float32, na_value=np.nan)


def known(nats: np.ndarray) -> bool:
    assert np.isnan(nats[0])
    return bool(np.isfinite(nats[1:]).all())


def in_rows(model: Any, prompt: Any) -> torch.Tensor:
    """Of logits that are there at once, float64."""
    ids = torch.tensor([prompt.ids])
    model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model.model(ids).logits[0, :-1].double()
    model.model.set_attn_implementation("kvlens")
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


@pytest.mark.parametrize("room", [0, 64 * 4 * 50, 1 << 20])
def test_what_waits_and_what_is_computed_at_once_are_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    model, prompt = random_llama(), random_prompt(300)
    monkeypatch.setattr(prefill, "WAITING_BYTES", room)
    found = Engine(model).read(prompt, prefill_chunk=37).surprisal
    held = sum(part.nbytes for part in found._waiting)
    assert held <= room
    assert (held == 64 * 4 * 299) == (room == 1 << 20)
    assert (held > 0) == (room > 0)
    nats = found.whole()
    torch.testing.assert_close(nats[1:].double(), in_rows(model, prompt), atol=1e-4, rtol=1e-4)
    assert found.known is nats
    assert found.whole() is nats
    assert not found._waiting, "nothing is held for what is known"
    assert not found._came
    again = Surprisals.restored(model, prompt.ids, found.state())
    assert (again.last, again.whole() is nats) == (float(nats[-1]), True)


def test_it_does_not_matter_how_the_prompt_was_cut_nor_where_they_waited() -> None:
    model, prompt = random_llama(), random_prompt(300)
    hidden = torch.randn(299, 64)
    parts = Surprisals(model, prompt.ids)
    for part in hidden.split(23):
        parts.wait(part)
    whole = Surprisals.restored(model, prompt.ids, {"hidden": hidden})
    assert parts.last == whole.last == float(parts.whole()[-1])
    assert torch.equal(parts.whole()[1:], whole.whole()[1:])
    assert torch.equal(Surprisals.restored(model, prompt.ids, parts.state()).whole()[1:], whole.whole()[1:])


@pytest.mark.parametrize("room", [0, 64 * 4 * 50, 1 << 20])
def test_the_last_is_the_same_whoever_asks_and_however_many_wait(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    model, prompt = random_llama(), random_prompt(300)
    monkeypatch.setattr(prefill, "WAITING_BYTES", room)
    hidden, last = 30 * torch.randn(299, 64), []
    for every in (True, False):
        found = Surprisals(model, prompt.ids, every)
        for part in hidden.split(64):
            found.wait(part)
        last.append(found.last)
        assert float(found.whole()[-1]) == found.last
        assert bool(torch.isfinite(found.whole()[1:-1]).all()) == every
    assert last[0] == last[1]


def test_who_is_given_the_turn_meanwhile_goes_on_where_the_other_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = random_llama(), random_prompt(300)
    monkeypatch.setattr(prefill, "ROWS", 50)
    alone, shared = (Engine(model).read(prompt).surprisal for _ in range(2))
    computed, told = [], []
    counted = Surprisals._computed

    def count(self: Surprisals, hidden: torch.Tensor, targets: torch.Tensor) -> Any:
        computed.append(len(hidden))
        return counted(self, hidden, targets)

    def turn(done: int, total: int) -> None:
        told.append(done)
        if done == 100:
            shared.whole()

    monkeypatch.setattr(Surprisals, "_computed", count)
    found = shared.whole(turn)
    assert told == [0, 50, 100]
    assert sum(computed) == 299 + 1, "every row once, and the last alone"
    assert torch.equal(found[1:], alone.whole()[1:])


def test_what_progress_raises_leaves_the_rest_to_the_next_who_asks() -> None:
    model, prompt = random_llama(), random_prompt(600)
    found, told = Engine(model).read(prompt).surprisal, []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done:
            raise Cancelled

    with pytest.raises(Cancelled):
        found.whole(stop)
    assert told == [(0, 599), (prefill.ROWS, 599)]
    assert found.known is None
    assert torch.isfinite(found.whole()[1:]).all()


@pytest.mark.parametrize(("method", "needed"), [("full", False), ("snapkv", False), ("sekv", True)])
def test_prefill_computes_them_only_for_a_method_that_places_by_them(demo: Any, method: str, needed: bool) -> None:
    sink = ListSink()
    prompt = random_prompt(200, vocabulary=demo.model.config.vocab_size)
    settings = {"max_new": 2, "budget": share_of(method, "0.5"), "preset": preset_of(method)}
    result = run(demo, prompt, method, sink=sink, **settings)
    assert sink.prefilled is not None
    assert [token.surprisal is not None for token in sink.prefilled.tokens[1:]] == [needed] * 199
    assert (result.surprisal.known is not None) == needed
    plain = run(demo, prompt, method, **settings)
    assert plain.surprisal.last == result.surprisal.last, "recorded or not"


def test_a_stored_run_has_them_after_its_last_step(tmp_path: Path) -> None:
    late, phases = ran(tmp_path)
    early, others = ran(tmp_path, "sekv")
    order = list(dict.fromkeys(phases))
    assert order.index("decode") < order.index("surprisal") < order.index("store")
    assert "surprisal" not in others
    with late, early:
        assert known(stored(late))
        np.testing.assert_array_equal(stored(late), stored(early))
        assert late.meta.surprisal_s is not None
        assert early.meta.surprisal_s is None
        assert late.meta.no_surprisal is early.meta.no_surprisal is None


def failing(*_: Any) -> None:
    raise NotImplementedError("no output layer")


def short(*_: Any) -> None:
    raise MemoryError


def test_whatever_befalls_them_costs_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = ran(tmp_path)
    stopped, _ = ran(tmp_path, cancel=lambda told: "surprisal" in told)
    monkeypatch.setattr(Surprisals, "whole", failing)
    failed, _ = ran(tmp_path)
    monkeypatch.setattr(Surprisals, "whole", short)
    lacking, _ = ran(tmp_path)
    for reader, why in ((stopped, "it was cancelled"), (failed, "it failed (NotImplementedError: no output layer)")):
        assert reader.meta.no_surprisal == why
    assert str(lacking.meta.no_surprisal).startswith(str(shortage(MemoryError()))[:12])
    for reader in (stopped, failed, lacking):
        assert reader.status == "completed"
        assert np.isnan(stored(reader)).all()
        assert reader.meta.output_text == whole.meta.output_text
        reader.close()
    whole.close()


def test_a_run_that_is_stopped_before_its_end_has_none(tmp_path: Path) -> None:
    reader, _ = ran(tmp_path, cancel=lambda told: told.count("decode") > 2)
    with reader:
        assert (reader.status, reader.meta.no_surprisal) == ("cancelled", None)
        assert np.isnan(stored(reader)).all()


def test_a_kept_prompt_gets_them_from_the_first_run_that_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    stopped, _ = ran(tmp_path, cancel=lambda told: "surprisal" in told)
    (read,) = (tmp_path / "readings").glob("*")
    before = read.stat().st_ino, read.stat().st_size
    first, _ = ran(tmp_path)
    (beside,) = set((tmp_path / "readings").glob("*")) - {read}
    assert (read.stat().st_ino, read.stat().st_size) == before, "the reading itself is not written again"
    assert beside.stat().st_size < 200 + 4 * first.meta.prompt_tokens
    second, phases = ran(tmp_path)
    with stopped, first, second:
        assert [reader.meta.prompt_kept for reader in (stopped, first, second)] == [False, True, True]
        assert (stopped.meta.surprisal_s is None, first.meta.surprisal_s is None) == (False, False)
        assert second.meta.surprisal_s is None
        assert "surprisal" not in phases
        assert known(stored(first))
        found = stored(second)
        np.testing.assert_array_equal(stored(first), found)
    monkeypatch.delenv(preparing.READINGS)
    itself, _ = ran(tmp_path)
    with itself:
        np.testing.assert_array_equal(stored(itself), found)


@pytest.mark.parametrize("failure", [SafetensorError("I/O error"), MemoryError(), OSError("no space")])
def test_where_they_cannot_be_kept_the_next_run_computes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    save = safetensors.torch.save_file

    def fails(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "surprisal" in tensors:
            raise failure
        save(tensors, path)

    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    for _ in range(2):
        reader, phases = ran(tmp_path)
        with reader:
            assert reader.status == "completed"
            assert known(stored(reader))
            assert "surprisal" in phases
    assert len(list((tmp_path / "readings").glob("*"))) == 1


@pytest.mark.parametrize("damage", [b"", b"\xff" * 400, save({"surprisal": torch.zeros(3)}), save({})])
def test_where_they_are_damaged_they_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    first, _ = ran(tmp_path)
    (beside,) = (tmp_path / "readings").glob("*.surprisal.*")
    beside.write_bytes(damage)
    second, phases = ran(tmp_path)
    with first, second:
        assert second.meta.prompt_kept
        assert "surprisal" in phases
        np.testing.assert_array_equal(stored(first), stored(second))


def test_how_far_they_are_ends_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "ROWS", 100)
    told: list[tuple[int, int]] = []
    request = RunRequest(model="demo", method="snapkv", budget="40%", max_new=2, ignore_eos=True)
    carry_out(
        request,
        PromptText(TEXT),
        tmp_path,
        lambda phase, done, total: told.append((done, total)) if phase == "surprisal" else None,
        lambda: False,
    )
    rows = told[0][1]
    assert rows > 200
    assert told == [*((done, rows) for done in range(0, rows, 100)), (rows, rows)]


def test_a_method_that_places_by_them_leaves_them_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    first, _ = ran(tmp_path, "sekv")
    second, phases = ran(tmp_path)
    with first, second:
        assert second.meta.prompt_kept
        assert "surprisal" not in phases
        np.testing.assert_array_equal(stored(first), stored(second))


def test_the_trace_refuses_another_number_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Surprisals.whole
    monkeypatch.setattr(Surprisals, "whole", lambda self, *told: whole(self, *told)[:-1])
    with raises_code("wrong_count", TraceError):
        ran(tmp_path)

"""A prompt that an earlier run has read: the same run, begun with placing; and a model that is in memory already."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from support import raises_code

from kvlens.cli import warm as keeping
from kvlens.engine import models
from kvlens.engine.engine import Engine
from kvlens.meta import RunMeta
from kvlens.models import device, find
from kvlens.runs import preparing, readings
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.chrometrace import KEPT, PREFILL, events
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

TEXT = "The farmer carried the copper kettle to the old harbor. " * 24


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Named as the place of readings; not there yet, as the app's is not."""
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    return tmp_path / "readings"


def ran(runs: Path, method: str = "snapkv", cancelled: int | None = None) -> tuple[RunMeta, dict[str, pd.DataFrame]]:
    """Meta and tables of a run. cancelled: after so many reports of how far it is."""
    told: list[str] = []
    request = RunRequest(model="demo", method=method, budget="40%", max_new=4, ignore_eos=True, prefill_chunk=64)
    uid, _, _ = carry_out(
        request,
        PromptText(TEXT),
        runs,
        lambda phase, done, total: told.append(phase),
        lambda: cancelled is not None and len(told) > cancelled,
    )
    with TraceReader.open(runs, uid) as reader:
        tables = {
            "tokens": reader.tokens().drop(columns="t_us"),
            "spans": reader.spans(),
            "masses": reader.head_spans(2, 1, 3),
            "events": reader.events(),
            "steps": reader.steps()[["step", "h2d_bytes", "d2h_bytes", "peak_bytes", "resident_bytes"]],
            "cube": pd.DataFrame(reader.head_cube("entropy").ravel()),
        }
        return reader.meta, tables


def readings_in(folder: Path) -> list[Path]:
    """Without what lies beside them."""
    return [path for path in folder.glob("*") if ".surprisal" not in path.name]


def same(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    for name, table in one.items():
        pd.testing.assert_frame_equal(table, other[name], check_exact=True, obj=name)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "sekv"])
def test_a_run_on_a_kept_prompt_is_the_run_that_reads_it_itself(tmp_path: Path, folder: Path, method: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(preparing.READINGS)
        plain, itself = ran(tmp_path / "a", method)
    first, made = ran(tmp_path / "b", method)
    again, found = ran(tmp_path / "c", method)
    same(itself, made)
    same(itself, found)
    assert (plain.prompt_kept, first.prompt_kept, again.prompt_kept) == (False, False, True)
    assert plain.prefill_s
    assert first.prefill_s
    assert again.prefill_s is None, "no prefill was timed"
    assert plain.prefill_peak_bytes == first.prefill_peak_bytes == again.prefill_peak_bytes
    assert len(readings_in(folder)) == 1
    assert folder.stat().st_mode & 0o077 == 0, "prompts are their owner's alone"


def test_reading_is_timed_as_the_prefill_that_it_is(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, slept = Engine.read, 0.3

    def slowly(*given: Any) -> Any:
        time.sleep(slept)
        return read(*given)

    monkeypatch.setattr(Engine, "read", slowly)
    meta, _ = ran(tmp_path)
    assert meta.prefill_s is not None
    assert meta.prefill_us is not None
    assert min(meta.prefill_s, meta.prefill_us / 1e6) >= slept
    names = []
    for uid in (meta.run_uid, ran(tmp_path)[0].run_uid):
        with TraceReader.open(tmp_path, str(uid)) as reader:
            names.append([event["name"] for event in events(reader) if event.get("cat") == "prefill"])
    assert names == [[PREFILL], [KEPT]]


def test_what_another_method_asks_for_beside_is_read_again_and_serves_both(tmp_path: Path, folder: Path) -> None:
    assert [ran(tmp_path, name)[0].prompt_kept for name in ("snapkv", "h2o", "snapkv", "h2o")] == [
        False,
        False,
        True,
        True,
    ]
    assert len(readings_in(folder)) == 1


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * 400])
def test_a_damaged_reading_is_made_again(tmp_path: Path, folder: Path, damage: object) -> None:
    _, itself = ran(tmp_path)
    path = readings_in(folder)[0]
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    meta, found = ran(tmp_path)
    assert not meta.prompt_kept
    same(itself, found)
    assert ran(tmp_path)[0].prompt_kept


def test_what_was_used_longest_ago_goes_when_there_is_too_much(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tmp_path)
    first = readings_in(folder)[0]
    monkeypatch.setattr(readings, "MOST_BYTES", int(2.5 * first.stat().st_size))
    monkeypatch.setattr(readings, "_size", lambda *_: 0)
    for number in range(2):
        shutil.copy(first, folder / f"{number}.safetensors")
    first.unlink()
    os.utime(folder / "1.safetensors", (0, 0))
    assert not ran(tmp_path)[0].prompt_kept
    assert sorted(path.name for path in readings_in(folder)) == sorted(["0.safetensors", first.name])


def test_what_killed_writers_left_counts_and_goes_but_for_the_newest(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tmp_path)
    first = readings_in(folder)[0]
    monkeypatch.setattr(readings, "MOST_BYTES", int(2.5 * first.stat().st_size))
    monkeypatch.setattr(readings, "_size", lambda *_: 0)
    for age in range(3):
        part = folder / f"{age}.{100 + age}"
        shutil.copy(first, part)
        os.utime(part, (3 - age, 3 - age))
    first.unlink()
    ran(tmp_path)
    assert {path.name for path in readings_in(folder)} == {"0.100", first.name}


@pytest.mark.parametrize("program", ["kvlens", "transformers"])
def test_another_version_reads_the_prompt_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    ran(tmp_path)
    place = "transformers.__version__" if program == "transformers" else "kvlens.runs.readings.__version__"
    monkeypatch.setattr(place, "0.0.1")
    assert not ran(tmp_path)[0].prompt_kept
    assert len(readings_in(folder)) == 2


def test_a_prompt_that_would_not_fit_is_read_by_the_run_itself(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "MOST_BYTES", 1000)
    assert not ran(tmp_path)[0].prompt_kept
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_the_head_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "gone" / "readings"))
    assert [ran(tmp_path)[0].prompt_kept for _ in range(2)] == [False, False]


def test_a_full_disk_costs_the_head_start_alone(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert [ran(tmp_path)[0].prompt_kept for _ in range(2)] == [False, False]
    assert not list(folder.glob("*"))


def test_reading_can_be_cancelled(tmp_path: Path, folder: Path) -> None:
    with raises_code("cancelled"):
        ran(tmp_path, cancelled=4)
    assert not folder.exists()


def test_a_kept_model_is_given_until_its_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_kept", {})
    folder = tmp_path / "model"
    shutil.copytree(models.resolve("demo"), folder)
    loaded = models.load(str(folder))
    assert models.load(str(folder)) is not loaded
    find.keep_model(str(folder), loaded)
    assert models.load(str(folder)) is loaded
    assert models.load(str(folder), dtype="bfloat16") is not loaded
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert models.load(str(folder)) is not loaded


def test_the_process_that_forks_keeps_the_default_model_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(find, "_kept", {})
    monkeypatch.setattr(device, "host_bytes", lambda: 1000)
    keeping.keep_model()
    assert find.find_model("demo") is None, "the model is more than a share of what is free"
    monkeypatch.setattr(device, "host_bytes", lambda: 1 << 40)
    keeping.keep_model()
    model = find.find_model("demo")
    assert model is not None
    assert torch.get_num_threads() == threads
    keeping.keep_model()
    assert find.find_model("demo") is model
    monkeypatch.setenv("KVLENS_MODEL", "no such model")
    keeping.keep_model()
    assert find.find_model("demo") is model, "a model that is not there is the run's to refuse"

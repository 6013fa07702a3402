"""A run in parts: its keys, of which the prompt's are shared, and its steps, measured a few layers at a time."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support import ListSink, measured_batches, method_of, random_prompt
from test_memoryneed import largest_allocation

from kvlens.engine.engine import Engine, Options
from kvlens.methods.snapkv import SnapKV
from kvlens.recording import layerparts, recorder
from kvlens.recording.keyparts import KeyParts, layer_keys
from kvlens.recording.measure import measure
from kvlens.recording.snapshot import Measured, Snapshot


@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_a_step_is_measured_a_few_layers_at_a_time(tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The columns equal those of all layers at once bit for bit, and no table of all layers' positions is made."""
    method, prompt = method_of(name), random_prompt(2_000, seed=3)
    options = Options(max_new=3, ignore_eos=True, coverage=True, oracle="all")
    params = method.Parameters(tokens=1_500) if name == "snapkv" else method.Parameters()
    batches = measured_batches(monkeypatch)
    Engine(tiny).run(prompt, method, params, None, options, ListSink())
    assert batches
    with torch.inference_mode():
        for shots in batches:
            whole = measure(shots, 16, 32)
            monkeypatch.setattr(layerparts, "PART_NUMBERS", 1)
            parts = measure(shots, 16, 32)
            shape = shots[-1].shadow.shape  # type: ignore[union-attr]
            table = 4 * len(shots) * shots[0].q[..., 0].numel() * shape[2]
            small = largest_allocation(lambda part=shots: measure(part, 16, 32))
            monkeypatch.undo()
            assert [pickle.dumps(step) for step in whole] == [pickle.dumps(step) for step in parts]
            assert shape[0] > 1
            assert small < table


class ForeignSnapKV(SnapKV):
    """A method that kvlens does not ship."""


def test_key_parts_stand_for_all_keys() -> None:
    keys = torch.randn(3, 2, 9, 4)
    parts = KeyParts(keys[:, :, :7], keys[:, :, 7:])
    assert parts.shape == keys.shape
    for layer in range(3):
        assert torch.equal(torch.cat(layer_keys(parts, layer), 1), keys[layer])
        assert [part.data_ptr() for part in layer_keys(keys, layer)] == [keys[layer].data_ptr()]
        assert layer_keys(parts, layer)[0].data_ptr() == keys[layer].data_ptr()


@pytest.mark.parametrize("kind", [method_of("snapkv"), ForeignSnapKV])
def test_coverage_takes_the_prompts_keys_without_a_copy(tiny: Any, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Of a method that others wrote it takes a copy."""
    shots: list[Snapshot] = []
    plain = recorder.measure

    def note(batch: list[Snapshot], *sizes: int) -> list[Measured]:
        shots.extend(batch)
        return plain(batch, *sizes)

    monkeypatch.setattr(recorder, "measure", note)
    engine, prompt = Engine(tiny), random_prompt(200, seed=3)
    read, full, options = engine.read(prompt), method_of("full"), Options(max_new=4, ignore_eos=True, coverage=True)
    engine.run(prompt, kind, kind.Parameters(tokens=40), None, options, ListSink(), read=read)
    shadows = [shot.shadow for shot in shots]
    shots.clear()
    engine.run(prompt, full, full.Parameters(), None, options, ListSink(), read=read)
    assert len(shadows) == 4
    for step, shadow in enumerate(shadows):
        assert isinstance(shadow, KeyParts)
        assert shadow.shape[2] == read.keys.shape[2] + step + 1
        assert torch.equal(shadow.prompt, read.keys)
        assert (shadow.prompt.data_ptr() == read.keys.data_ptr()) == (kind is not ForeignSnapKV)
    whole = shots[0].shadow
    assert isinstance(whole, torch.Tensor)
    first = torch.cat(layer_keys(shadows[0], 0), 1)  # type: ignore[arg-type]
    assert torch.equal(first, whole[0])

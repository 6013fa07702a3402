"""Steps are measured a few layers at a time."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support import ListSink, measured_batches, method_of, random_prompt
from test_memoryneed import largest_allocation

from kvlens.engine.engine import Engine, Options
from kvlens.recording import layerparts
from kvlens.recording.measure import measure


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

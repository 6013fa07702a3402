"""A prompt that was read once for several runs: one copy of its keys and values, which no run changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import method_of, random_prompt

from kvlens.engine.engine import Engine, Options
from kvlens.methods.base import own_method
from kvlens.methods.full import FullKV
from kvlens.tiers.slots import PromptStore


def test_runs_of_a_reading_hold_no_copy_of_it(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    append = PromptStore.append

    def watched(store: PromptStore, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        copied.append(keys.nbytes + values.nbytes)
        append(store, layer, keys, values)

    engine, prompt = Engine(tiny), random_prompt(120, seed=3)
    monkeypatch.setattr(PromptStore, "append", watched)
    read = engine.read(prompt)
    assert sum(copied) == read.keys.nbytes + read.values.nbytes
    before = read.keys.clone(), read.values.clone()
    copied.clear()
    options = Options(max_new=4, ignore_eos=True)
    alone = engine.run(prompt, method_of("full"), FullKV.Parameters(), None, options)
    copied.clear()
    results = [engine.run(prompt, method_of("full"), FullKV.Parameters(), None, options, read=read) for _ in range(2)]
    assert not copied
    assert [result.ids for result in results] == [alone.ids] * 2
    assert all(torch.equal(*pair) for pair in zip(before, (read.keys, read.values), strict=True))


def test_a_method_from_outside_gets_a_copy_of_a_reading(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(FullKV):
        name = "foreign"

    engine, prompt = Engine(tiny), random_prompt(120, seed=3)
    read, stores = engine.read(prompt), []
    append = PromptStore.append

    def watched(store: PromptStore, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        stores.append(store)
        append(store, layer, keys, values)

    monkeypatch.setattr(PromptStore, "append", watched)
    engine.run(prompt, Foreign, Foreign.Parameters(), None, Options(max_new=2, ignore_eos=True), read=read)
    assert len(stores) == tiny.shape.layers
    assert stores[0].keys.data_ptr() != read.keys.data_ptr()


def test_a_composition_with_a_part_from_outside_is_from_outside() -> None:
    class Foreign(method_of("snapkv")):  # type: ignore[misc]
        name = "foreign"

    shipped = method_of("chunk:snapkv+kivi")
    joined = type("Joined", (method_of("chunk:snapkv").__mro__[1], Foreign), {"__module__": shipped.__module__})
    assert own_method(shipped)
    assert joined.__module__ == shipped.__module__
    assert not own_method(joined)

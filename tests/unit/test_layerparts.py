"""A run in parts: its keys, of which the prompt's are shared, and its steps, measured a few layers at a time."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ListSink, measured_batches, method_of, random_prompt
from test_memoryneed import largest_allocation

from kvlens.engine.engine import Engine, Options
from kvlens.memory.reads import Distance, Reads
from kvlens.methods import make_parameters
from kvlens.methods.snapkv import SnapKV
from kvlens.recording import layerparts, recorder
from kvlens.recording.layerparts import KeyParts, joined, layer_keys, split_alike
from kvlens.recording.measure import measure
from kvlens.recording.sampling import steps_together
from kvlens.recording.snapshot import Attended, Measured, Snapshot
from kvlens.shape import KVShape


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


@pytest.mark.parametrize(
    ("name", "changes"),
    [("kivi", {}), ("turboquant", {}), ("finch", {}), ("sekv", {"router": "pca", "zones": "layer"})],
)
def test_what_is_made_for_the_attention_is_made_once_a_step(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any]
) -> None:
    """Recording takes the slots that the attention went through; packed tokens are not restored again for it."""
    method, prompt, made = method_of(name), random_prompt(300, seed=5), []
    for owner, maker in ((Reads, "_made"), (Distance, "rotate_slots")):
        plain = getattr(owner, maker)

        def counted(*arguments: Any, _plain: Any = plain) -> Any:
            slots = _plain(*arguments)
            if slots is not None:
                made.append(slots)
            return slots

        monkeypatch.setattr(owner, maker, counted)
    counts, params = [], make_parameters(method, "demo" if "demo" in method.presets else None, changes)
    for sink in (None, ListSink()):
        made.clear()
        options = Options(max_new=4, ignore_eos=True, coverage=True)
        Engine(tiny).run(prompt, method, params, None, options, sink)
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def test_neighbouring_layers_with_equally_many_slots_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(layers: int, slots: int, seen: bool = False) -> Attended:
        tables = [torch.full((layers, 2, slots), number) for number in (1, 2, 3)]
        return Attended(torch.rand(layers, 2, 3, slots), torch.ones(layers, 2, 3, slots) > 0 if seen else None, *tables)

    groups = [group(1, 5), group(2, 5), group(1, 5, seen=True), group(1, 4), group(1, 4)]
    whole = joined(groups)
    assert [len(each.weights) for each in whole] == [3, 1, 2]
    assert torch.equal(whole[0].weights, torch.cat([groups[0].weights, groups[1].weights]))
    assert whole[0].visible is None
    assert whole[1] is groups[2]
    monkeypatch.setattr(layerparts, "PART_NUMBERS", 2 * groups[0].weights.numel())
    assert [len(each.weights) for each in joined([group(1, 5) for _ in range(5)])] == [2, 2, 1]


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
    assert shadows[0] is not None
    assert torch.equal(torch.cat(layer_keys(shadows[0], 0), 1), whole[0])


@pytest.mark.parametrize(("name", "products"), [("full", 1), ("snapkv", 2)])
def test_steps_that_are_measured_together_share_the_products_of_a_layer(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, products: int
) -> None:
    """One with the prompt's keys, and one with those of decoded tokens where these lie apart; keys are not joined."""
    method, prompt = method_of(name), random_prompt(300, seed=3)
    options = Options(max_new=8, ignore_eos=True, coverage=True, oracle="every=2")
    params = method.Parameters(tokens=100) if name == "snapkv" else method.Parameters()
    batches = measured_batches(monkeypatch)
    Engine(tiny).run(prompt, method, params, None, options, ListSink())
    first, steps = batches
    assert len(first) == 1, "the first step has no query before it"
    assert [bool(shot.sampled) for shot in steps] == [False, True, False, True, False, True, False]
    calls: list[int] = []
    joined: list[torch.Size] = []
    multiply, join, keys = torch.baddbmm, torch.cat, steps[-1].shadow
    assert keys is not None

    def counted(*tensors: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return multiply(*tensors, **options)

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        joined.append((found := join(*arguments, **options)).shape)
        return found

    monkeypatch.setattr(torch, "baddbmm", counted)
    monkeypatch.setattr(torch, "cat", watched)
    with torch.inference_mode():
        measure(steps, 16, 32)
    assert len(calls) == products * len(steps[0].q)
    assert keys.shape[1:] not in [shape[-3:] for shape in joined]


def test_steps_of_another_form_are_measured_apart() -> None:
    """A step that is not sampled joins the steps before it; one whose full-KV attention is missing does not."""
    shot = Snapshot([], torch.zeros(1, 1, 1), None, None, [None], {}, {}, torch.zeros(1, 1, 1, 1), scaling=1.0, spans=1)
    sampled, with_full_kv = replace(shot, sampled=(0,)), replace(shot, sampled=(0,), reference=torch.zeros(1, 1, 1, 1))
    other = replace(shot, shadow=None)
    steps = [shot, sampled, shot, sampled, with_full_kv, shot, with_full_kv, other, other]
    assert list(split_alike(steps)) == [range(4), range(4, 7), range(7, 9)]
    assert list(split_alike([])) == []


def test_long_contexts_are_measured_fewer_steps_at_a_time() -> None:
    wide = KVShape(layers=32, q_heads=32, kv_heads=8, head_dim=64, itemsize=4)

    def together(tokens: int, slots: int, every: int | None = None) -> int:
        return steps_together(wide, tokens, slots, tokens // 16, every)

    assert [together(tokens, 0) for tokens in (1_024, 8_192, 32_768, 131_072)] == [8, 8, 7, 1]
    assert [together(tokens, tokens // 5) for tokens in (1_024, 8_192, 32_768)] == [8, 7, 7]
    assert [together(tokens, tokens) for tokens in (1_024, 8_192, 32_768)] == [8, 1, 1]
    assert [together(tokens, 0, every) for tokens, every in ((1_024, 1), (8_192, 2), (32_768, 5))] == [8, 2, 4]
    assert steps_together(wide, 1, 0, 0, None) == 8


@pytest.mark.parametrize("tokens", [1_024, 2_048, 8_192, 32_768])
def test_lanes_of_a_race_take_equally_many_steps_at_a_time(tokens: int) -> None:
    """They share full KV's passes, whose batches must be the same, whatever a method's slots and spans are."""
    shape = KVShape(layers=32, q_heads=32, kv_heads=8, head_dim=64, itemsize=4)
    sizes = [(0, tokens // 16), (tokens // 5, tokens // 16), (tokens, tokens // 32), (tokens // 2, 1)]
    assert len({steps_together(shape, tokens, *each, every=2) for each in sizes}) == 1

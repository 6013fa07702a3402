"""All keys of a run, of which the prompt's are shared, and the heap's freed memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ListSink, method_of, random_prompt

from kvlens.engine.engine import Engine, Options
from kvlens.methods.snapkv import SnapKV
from kvlens.models import device
from kvlens.recording import recorder
from kvlens.recording.keyparts import KeyParts
from kvlens.recording.snapshot import Measured, Snapshot


class ForeignSnapKV(SnapKV):
    """A method that kvlens does not ship."""


def test_key_parts_stand_for_all_keys() -> None:
    keys = torch.randn(3, 2, 9, 4)
    parts = KeyParts(keys[:, :, :7], keys[:, :, 7:])
    assert parts.shape == keys.shape
    assert torch.equal(parts.whole(), keys)
    assert all(torch.equal(*pair) for pair in zip(parts, keys, strict=True))


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
    assert torch.equal(shadows[0].whole()[0], whole[0])  # type: ignore[union-attr]


def test_freed_memory_is_given_back_only_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Other:
        """A C library without malloc_trim."""

    class Glibc:
        """A C library that notes its calls."""

        def malloc_trim(self, *sizes: int) -> None:
            calls.append(sizes)

        def mallopt(self, *sizes: int) -> None:
            calls.append(sizes)

    def fail(name: None) -> None:
        raise OSError

    for library, answer in ((lambda name: Other(), False), (fail, False), (lambda name: Glibc(), True)):
        monkeypatch.setattr(device.ctypes, "CDLL", library)
        device._library.cache_clear()
        assert device.give_back_heap() is answer
        assert bool(calls) is answer
    assert device.give_back_heap()
    assert calls == [(-3, device.LARGE), (-1, 2 * device.LARGE), (0,), (0,)]
    monkeypatch.undo()
    device._library.cache_clear()

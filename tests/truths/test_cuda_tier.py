"""The whole engine over the CUDA link, on the CPU: its streams are drawn schedules (tests/fakestreams.py), its pinned
memory is counted.

What the model computes is computed at once, as the host asks for it; copies are done as late as whoever waits for them
allows, or at a drawn moment before. Every method comes to the same bits as over the threads of the CPU's own link.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakestreams import FakeDevice
from support import ListSink, Prompts, makes, preset_of, run

from kvlens import methods

NAMES = [name for name in makes() if not methods.get(name).keeps_all]
NEW = 16


def moved(sink: ListSink) -> list[tuple[Any, ...]]:
    assert sink.prefilled is not None
    rows = sink.prefilled.transfers + [row for record in sink.steps for row in record.transfers]
    return [(r.step, r.layer, r.kv_head, r.span, r.direction, r.cause, r.bytes, r.blocking) for r in rows]


SETTINGS = {"budget": "0.3", "max_new": NEW, "keep_logits": True, "ignore_eos": True}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_over_streams_is_the_run_over_threads(
    demo: Any, prompts: Prompts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts.task("multikey", 512)
    settings = {**SETTINGS, "preset": preset_of(name), "coverage": True, "read": prompts.read(prompt, name)}
    host = ListSink()
    plain = run(demo, prompt, name, sink=host, **settings)
    for lazy in (True, False):
        streams, device = ListSink(), FakeDevice(seed=1, eager=True, lazy=lazy)
        monkeypatch.setattr("kvlens.memory.memory.link_for", lambda at, ledger, device=device: device.link(ledger))
        other = run(demo, prompt, name, sink=streams, **settings)
        assert plain.ids == other.ids
        assert all(torch.equal(a, b) for a, b in zip(plain.logits, other.logits, strict=True))
        assert moved(host) == moved(streams)
        assert all(check.passed for check in other.checks), other.checks
        assert all(row.end_us >= row.start_us for record in streams.steps for row in record.transfers)
        assert not device.pinned, "pinned memory outlived the run"
        assert all(not stream.queue for stream in device.all)


def test_a_model_that_does_not_wait_attends_something_else(
    demo: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    prompt = prompts.task("multikey", 512)
    settings = {**SETTINGS, "preset": "demo", "read": prompts.read(prompt, "freekv")}
    plain = run(demo, prompt, "freekv", **settings)
    device = FakeDevice(seed=1, eager=True, lazy=True, broken=frozenset({("compute", "waits")}))
    monkeypatch.setattr("kvlens.memory.memory.link_for", lambda at, ledger: device.link(ledger))
    other = run(demo, prompt, "freekv", **settings)
    assert not all(torch.equal(a, b) for a, b in zip(plain.logits, other.logits, strict=True))

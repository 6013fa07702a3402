"""What is logged, against an independent float64 computation over positions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, random_prompt, run, task_prompt

from kvlens.kernels.pool_attend import Live
from kvlens.link.copies import Move
from kvlens.memory.reads import Reads
from kvlens.recording import layerparts, measure, oracle
from kvlens.records import PrefillRecord


def test_masses_entropy_and_coverage_of_streaming_llm(tiny: Any) -> None:
    """StreamingLLM on a random model: recompute each step's attention from a stock cache over the kept positions."""
    prompt, new, sinks, window = random_prompt(200, seed=9), 6, 4, 20
    sink = ListSink()
    from kvlens.engine.session import Session

    seen: list[tuple[int, torch.Tensor]] = []
    original = Session.attend

    def spy(self: Session, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        if self.decoding:
            seen.append((layer, q[0, :, 0].double()))
        return original(self, layer, q, scaling)

    written: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(3)}
    original_write = Session.write

    def spy_write(self: Session, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        written[layer].append(k.double())
        original_write(self, layer, k, v)

    Session.attend, Session.write = spy, spy_write  # type: ignore[method-assign]
    try:
        places = {"sinks": sinks, "tokens": sinks + window}
        run(tiny, prompt, "streaming_llm", overrides=places, max_new=new, sink=sink, coverage=True)
    finally:
        Session.attend, Session.write = original, original_write  # type: ignore[method-assign]
    for index, (layer, q) in enumerate(seen):
        record = sink.steps[index // 3]
        k = torch.cat(written[layer], 1)[:, : 200 + record.step]
        n = k.shape[1]
        kept = [*range(sinks), *range(n - window, n)]
        for head in range(8):
            scores = (k[head // 4] @ q[head] / 8**0.5).numpy()
            full = np.exp(scores - scores.max())
            full /= full.sum()
            p = np.exp(scores[kept] - scores[kept].max())
            p /= p.sum()
            head_row = {name: column[layer, head] for name, column in record.head.items()}
            np.testing.assert_allclose(head_row["mass_sink"], p[:sinks].sum(), atol=1e-5)
            np.testing.assert_allclose(head_row["mass_window"], p[sinks:].sum(), atol=1e-5)
            np.testing.assert_allclose(head_row["entropy"], -(p * np.log(p)).sum(), atol=1e-4)
            np.testing.assert_allclose(head_row["coverage"], full[kept].sum(), atol=1e-5)
            if record.step:
                before = seen[index - 3][1][head]
                cosine = float(q[head] @ before / q[head].norm() / before.norm())
                np.testing.assert_allclose(head_row["qcos"], cosine, atol=1e-5)
        assert (record.kv["attended_tokens"] == sinks + window).all()
        assert (record.kv["read_bytes"] == (sinks + window) * tiny.shape.head_token_bytes).all()


def test_a_token_is_attended_when_any_query_head_of_the_group_reads_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[int, int], torch.Tensor] = {}
    plain = Reads.bias

    def recorded_bias(reads: Reads, layer: int, *arguments: Any) -> tuple[torch.Tensor | None, Live | None]:
        bias, live = plain(reads, layer, *arguments)
        assert bias is not None
        seen[reads.log.step, layer] = bias > -torch.inf
        return bias, live

    monkeypatch.setattr(Reads, "bias", recorded_bias)
    sink, places = ListSink(), {"page": 8, "tokens": 32, "dense_layers": 0, "least_pages": 1}
    run(tiny, random_prompt(150, seed=4), "quest", overrides=places, max_new=4, sink=sink)
    alone = 0
    for (step, layer), read in seen.items():
        attended = read.any(1).sum(-1)
        assert sink.steps[step].kv["attended_tokens"][layer].tolist() == attended.tolist()
        alone += int((attended > read.sum(-1).amax(1)).sum())
    assert alone, "query heads of a group read different pages, or this shows nothing"


def test_the_time_a_trace_takes_to_begin_is_no_time_of_prefill(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ahead_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead_s[0])

    class Slow(ListSink):
        def prefill(self, record: PrefillRecord) -> None:
            super().prefill(record)
            ahead_s[0] = 1e6

    assert 0 < run(tiny, random_prompt(40), "streaming_llm", sink=Slow(), max_new=1).prefill_s < 1e5


def test_copies_still_under_way_when_the_run_ends_reach_the_trace(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """zoom=next moves spans behind the step that asked for them; a slow link must not lose the last step's rows."""
    original = Move.run

    def slow(self: Move) -> None:
        time.sleep(0.005)
        original(self)

    prompt, _ = task_prompt(demo, "multikey", 600, max_new=3)
    sink = ListSink()
    monkeypatch.setattr(Move, "run", slow)
    settings = {"budget": "0.6", "preset": "demo", "overrides": {"zoom": "next"}, "max_new": 3, "ignore_eos": True}
    result = run(demo, prompt, "sekv", sink=sink, **settings)
    rows = [t for record in sink.steps for t in record.transfers if t.direction == "h2d"]
    assert sum(t.bytes for t in rows if t.step == 2) > 0
    assert sum(t.bytes for t in rows) == sum(record.kv["h2d_bytes"].sum() for record in sink.steps)
    assert all(check.passed for check in result.checks)


def test_full_kv_computes_no_column_that_is_known(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of several steps are made at once, full attention once, and what follows from keeping all is not
    computed. The figures are those of the general way."""
    computed: list[str] = []
    for module, name in (
        (measure, "FullAttention"),
        (measure, "coverage"),
        (measure, "selection_recall"),
        (oracle, "read_positions"),
        (layerparts, "attention_shares"),
    ):
        monkeypatch.setattr(module, name, partial(_counted, computed, name, getattr(module, name)))

    def recorded() -> ListSink:
        sink = ListSink()
        run(tiny, random_prompt(200, seed=4), "full", max_new=10, sink=sink, coverage=True)
        return sink

    known = recorded()
    assert set(computed) == {"FullAttention"}
    assert len(computed) < len(known.steps) / 2
    monkeypatch.setattr(Reads, "in_order", lambda reads, positions: False)
    general = recorded()
    assert set(computed) > {"coverage", "selection_recall", "read_positions", "attention_shares"}
    for now, before in zip(known.steps, general.steps, strict=True):
        for columns, others in ((now.head, before.head), (now.kv, before.kv)):
            assert columns.keys() == others.keys()
            for name, column in columns.items():
                np.testing.assert_allclose(column, others[name], atol=1e-5, err_msg=name)
        assert now.oracle is not None
        assert before.oracle is not None
        np.testing.assert_allclose(now.oracle.full, before.oracle.full, atol=1e-5)
        assert (now.oracle.lost_pos == -1).all()


def _counted(calls: list[str], name: str, plain: Any, *arguments: Any) -> Any:
    calls.append(name)
    return plain(*arguments)

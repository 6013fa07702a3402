"""What RetroInfer's reads and records are of: entries and their members, decisions, held tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial

from kvlens.holds import Hold
from kvlens.kernels.pool_attend import Live
from kvlens.kernels.slot_tables import SlotReads, slot_bias
from kvlens.recording.decisions import decisions_at
from kvlens.recording.fullattention import read_positions
from kvlens.recording.snapshot import Attended, DecidedStep
from kvlens.tiers.slots import ROLE

N, NEW, SINKS, SEGMENT = 93, 40, 3, 16
SET: dict[str, Any] = {"sinks": SINKS, "window": 8, "page": SEGMENT, "cluster": 4, "rounds": 5}
SET |= {"retrieval": 0.1, "estimation": 0.3, "tokens": SINKS + 8 + 13}


def test_the_log_names_the_tokens_that_entries_stand_for() -> None:
    trial = Trial("retroinfer", N, NEW, **SET)

    seen = Seen(trial.session).decided
    trial.step(0)
    bias, selection = seen[1]
    slots = trial.session.memory.reads.slots(1, bias)
    method = trial.session.method
    for h in range(SHAPE.kv_heads):
        entries = selection.entries[h, 0].nonzero()[:, 0]
        labels = method._labels[1, h, : method._pages * SEGMENT]
        members = (torch.isin(labels.long(), entries).nonzero()[:, 0] + SINKS).tolist()
        assert selection.summarised[h, 0].nonzero()[:, 0].tolist() == members
        is_read, is_coarse = bias[h, 0] > -torch.inf, slots.role[h] == ROLE["coarse"]
        assert not set(members) & set(slots.position[h, is_read & ~is_coarse].tolist())
        coarse = is_read & is_coarse
        sizes = method._sizes[1, h, entries].float()
        np.testing.assert_allclose(bias[h, 0][coarse], sizes.log(), atol=1e-5)


def test_tokens_that_stay_unread_in_the_block_cache_are_not_asked_for() -> None:
    trial, unread = Trial("retroinfer", N, NEW, **SET), 0

    seen = Seen(trial.session).decided
    memory = trial.session.memory
    for step in range(4):
        trial.step(step)
        layers = range(SHAPE.layers)
        decided = DecidedStep([seen[layer][1] for layer in layers], memory.spans.is_hot, [])
        decisions, counts = decisions_at(decided), memory.host.recaller.counts
        assert decisions is not None
        zone = slice((pool := memory.hot.parts[0][0]).start["recall"], pool.start["window"])
        read = np.array([(seen[layer][0][:, 0, zone] > -torch.inf).sum(1).tolist() for layer in layers])
        np.testing.assert_array_equal(decisions.requested, read.ravel())
        np.testing.assert_array_equal(decisions.granted, read.ravel())
        np.testing.assert_array_equal(counts["recalled_tokens"] + counts["reused_tokens"], read)
        unread += sum(int((seen[layer][1].rows >= 0).sum()) for layer in layers) - read.sum()
    assert unread > 0, "the block cache held tokens that no query head read"


def test_an_entry_counts_the_tokens_that_are_not_held() -> None:
    """Holds of the first half of each segment, its first token among them, then of one whole segment."""
    heads = tuple((1, head) for head in range(SHAPE.kv_heads))
    starts = range(SINKS, SINKS + 4 * SEGMENT, SEGMENT)
    halves = [Hold(2, start, start + SEGMENT // 2, heads, whole=False) for start in starts]
    whole = Hold(3, SINKS, SINKS + SEGMENT, heads)
    trials = [Trial("retroinfer", N, NEW, **SET, holds=holds) for holds in ((), tuple(halves), (whole,))]
    seen = []
    for trial in trials:
        looked = Seen(trial.session)
        trial.step(0)
        seen.append(looked.decided[1])
    pool = trials[0].session.memory.hot.parts[1][0]
    count, changed = seen[0][1].entries.shape[-1], 0
    entries = slice(pool.start["coarse"], pool.start["coarse"] + count)
    plain = seen[0][0][:, 0, entries].exp()
    for trial, (bias, selection), holds in zip(trials[1:], seen[1:], (halves, [whole]), strict=True):
        held = {p for hold in holds for p in range(hold.tok_start, hold.tok_end)}
        assert held <= set(trial.attended(1, 0, bias))
        for h in range(SHAPE.kv_heads):
            members = [np.flatnonzero(selection.members[h] == entry) for entry in range(count)]
            left = [len(set(positions.tolist()) - held) for positions in members]
            expected = torch.tensor(left).where(plain[h] > 0, 0)
            np.testing.assert_allclose(bias[h, 0, entries].exp(), expected, atol=1e-4)
            changed += int((expected != plain[h].round()).sum())
    assert changed > 2, "held tokens belong to entries that are read"


def test_no_pages_are_read_of_the_bias_without_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("retroinfer", N, NEW, **SET)
    trial.step(0)
    reads = trial.session.memory.reads
    selection = trial.session.method.select(1, torch.ones(SHAPE.q_heads, SHAPE.head_dim))
    empty = torch.zeros(SHAPE.kv_heads, 1, dtype=torch.int32)

    def tables(by: str, of_slots: SlotReads, page: int) -> Live:
        return Live(empty, empty, empty[:, 0], slot_bias(of_slots))

    monkeypatch.setattr("kvlens.memory.reads.tables_by", tables)
    monkeypatch.setattr(reads, "by", "triton")
    bias, live = reads.bias(1, selection)
    assert bias is not None
    assert live is None


def test_tokens_of_clusters_that_were_not_read_are_unread() -> None:
    """One span of four tokens has two summaries, of which one is read: it stands for positions 0 and 2."""
    role = torch.tensor([[[ROLE["coarse"], ROLE["coarse"], ROLE["window"]]]], dtype=torch.uint8)
    span, position = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[0, 0, 4]]])
    bias, weights = torch.tensor([[[[0.0, -torch.inf, 0.0]]]]), torch.tensor([[[[0.5, 0.0, 0.5]]]])
    owners = torch.tensor([[1, 1, 1, 1, 0]])
    members = torch.tensor([[[[True, False, True, False, False]]]])
    by_cluster = Attended(weights, bias == 0, role, span, position, summarised=members)
    by_whole_span = Attended(weights, bias == 0, role, span, position)
    assert read_positions([by_cluster], 1, [0], owners).flatten().tolist() == [True, False, True, False, True]
    assert read_positions([by_whole_span], 1, [0], owners).all()

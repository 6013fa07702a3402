"""What is logged of a step, computed beside the run: reads queries, slots and tables, changes nothing, and hands rows to a sink."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlens.kernels.attend import attention_weights
from kvlens.memory import FREE, ROLE, Memory, Selection
from kvlens.rows import MASS_COLUMNS, ROLES, PrefillRecord, PromptToken, SelfCheck, StepRecord, TraceSink

EXACT = tuple(ROLE[name] for name in ("sink", "anchor", "window", "resident"))
MASS_TOLERANCE = 1e-3


@dataclass
class _Seen:
    """One layer's decision, as the session showed it."""

    q: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    zoomed: torch.Tensor | None
    zoomable: torch.Tensor | None
    fetched: list[int]
    reused: list[int]
    measured: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class StepFacts:
    """What the engine knows of a step besides the attention. Times in us since the run began."""

    step: int
    t_us: int
    dur_us: int
    token_id: int
    text: str
    logprob: float
    next_entropy: float


class Recorder:
    """Observes one session's layers and turns each step into one StepRecord.

    top_k: spans logged one by one per query head, the rest of the mass goes to the tail. coverage: also keep a copy of all keys
    (outside the budget, an instrument of its own) and log how much of full attention's mass lies on entries attended exactly.
    """

    def __init__(self, memory: Memory, sink: TraceSink, top_k: int = 16, coverage: bool = False) -> None:
        self.memory, self.sink, self.top_k, self.coverage = memory, sink, top_k, coverage
        self._seen: list[_Seen] = []
        self._previous: torch.Tensor | None = None
        self._shadow: torch.Tensor | None = None
        self._worst_mass = 0.0
        self._rows = 0
        self._steps = 0
        self._over_budget = 0
        self._kv_bytes = {"h2d": 0, "d2h": 0}
        self._row_bytes = {"h2d": 0, "d2h": 0}

    # ----------------------------------------------------------------------------------------------------------- the session's side
    def layer(
        self, layer: int, q: torch.Tensor, bias: torch.Tensor | None, scaling: float, selection: Selection | None,
        fetched: list[int], reused: list[int],
    ) -> None:  # fmt: skip
        zoomed = zoomable = None
        if selection is not None:
            zoomed = (selection.fine & self.memory.is_hot[layer][:, None] & selection.zoomable).sum(-1)
            zoomable = selection.zoomable.sum()
        seen = _Seen(q, bias, scaling, zoomed, zoomable, fetched, reused)
        if selection is not None and selection.later:
            # The slots are about to be overwritten in the background, so this layer is measured now.
            seen.measured = self._measure([layer], [seen])
        self._seen.append(seen)

    def prompt_keys(self, keys: torch.Tensor, max_new: int) -> None:
        """Copy of the prompt's keys [L, H_kv, n, D] for coverage, with room for the decoded tokens."""
        if self.coverage:
            self._shadow = torch.zeros(*keys.shape[:2], keys.shape[2] + max_new, keys.shape[3], dtype=keys.dtype, device=keys.device)
            self._shadow[:, :, : keys.shape[2]] = keys

    # ------------------------------------------------------------------------------------------------------------ the engine's side
    def prefill(self, tokens: list[PromptToken], prefill_us: int, peak_bytes: int) -> None:
        memory = self.memory
        record = PrefillRecord(
            tokens, memory.spans.drain_born(), memory.drain_span_heads(), memory.ledger.drain(), memory.drain_events(), prefill_us,
            peak_bytes, memory.cold.bytes, memory.account.resident,
        )  # fmt: skip
        self._count_rows(record.transfers)
        self._kv_bytes = {d: self._kv_bytes[d] + sum(e.bytes for e in memory.ledger.opened if e.direction == d) for d in self._kv_bytes}
        self.sink.prefill(record)

    def step(self, facts: StepFacts, position: int) -> None:
        """All layers of a step have been seen; the method has not yet rearranged anything."""
        began = time.perf_counter_ns()
        layers = self._measure_all()
        head, kv = self._head_columns(layers, position), self._kv_columns(layers)
        spans = layers["span_mass"]
        top = spans.topk(min(self.top_k, spans.shape[-1]), -1)
        tail = (spans.sum(-1) - top.values.sum(-1)).clamp(min=0)
        top_span = torch.where(top.values > 0, top.indices, -1)
        memory = self.memory
        account = memory.account
        if account.limit is not None and account.peak > account.limit:
            self._over_budget += 1
        record = StepRecord(
            facts.step, facts.t_us, facts.dur_us, 0, 0, facts.token_id, facts.text, facts.logprob, facts.next_entropy,
            account.resident, account.peak, memory.cold.bytes, head, kv, top_span.numpy(force=True).astype(np.int32),
            top.values.numpy(force=True), tail.numpy(force=True), memory.ledger.drain(), memory.drain_events(),
            memory.spans.drain_born(), [], memory.drain_span_heads(),
        )  # fmt: skip
        record.wait_us = memory.waited_ns // 1000
        self._count_rows(record.transfers)
        self._rows += head["entropy"].size
        self._steps += 1
        self._seen = []
        record.record_us = (time.perf_counter_ns() - began) // 1000
        self.sink.step(record)

    def checks(self) -> list[SelfCheck]:
        """The truths this run can check on itself, to be stored with it."""
        memory, shape = self.memory, self.memory.shape
        expected = self._steps * shape.layers * shape.q_heads
        self._count_rows(memory.ledger.drain())
        total = memory.ledger.total
        limit = memory.account.limit
        return [
            SelfCheck("masses add up to 1", self._worst_mass <= MASS_TOLERANCE, self._worst_mass,
                      "largest |sum of masses over roles - 1| over all (step, layer, query head)"),
            SelfCheck("no row is missing", self._rows == expected, float(self._rows), f"{expected} rows of (step, layer, query head) expected"),
            SelfCheck("ledger rows equal bytes moved", self._row_bytes == total, float(total["h2d"] + total["d2h"]),
                      f"moved: h2d {total['h2d']} B, d2h {total['d2h']} B; rows: h2d {self._row_bytes['h2d']} B, d2h {self._row_bytes['d2h']} B"),
            SelfCheck("bytes per KV head equal ledger", self._kv_bytes == total, float(self._kv_bytes["h2d"]),
                      "sums over (step, layer, KV head) and prefill against the ledger"),
            SelfCheck("peak within budget", self._over_budget == 0, float(self._over_budget),
                      "no limit was set" if limit is None else f"steps whose peak passed {limit} B"),
        ]  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------------ internal
    def _measure_all(self) -> dict[str, torch.Tensor]:
        pending = [i for i, seen in enumerate(self._seen) if seen.measured is None]
        if len(pending) == len(self._seen):
            return self._measure(pending, self._seen)
        for i in pending:
            self._seen[i].measured = self._measure([i], [self._seen[i]])
        parts = [seen.measured for seen in self._seen if seen.measured is not None]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _measure(self, layers: list[int], seen: list[_Seen]) -> dict[str, torch.Tensor]:
        """Masses of some layers: per role [l, Hq, R], per span [l, Hq, S], entropy [l, Hq], attended entries [l, H_kv]."""
        hot, shape = self.memory.hot, self.memory.shape
        every = len(layers) == shape.layers
        live = self.memory.live_prefix() if seen[0].bias is None else None
        pick = slice(None) if every else slice(layers[0], layers[0] + 1)
        keys, role, span = hot.keys[pick, :, :live], hot.role[pick, :, :live].long(), hot.span[pick, :, :live].long()
        bias = None if seen[0].bias is None else torch.stack([s.bias for s in seen if s.bias is not None])
        p = attention_weights(torch.stack([s.q for s in seen]), keys, bias, seen[0].scaling)
        rows = p.shape[:3]
        roles = p.new_zeros(*rows, FREE + 1).scatter_add_(-1, role[:, :, None].expand_as(p), p)
        spans = p.new_zeros(*rows, self.memory.spans.capacity).scatter_add_(-1, span[:, :, None].expand_as(p), p)
        entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
        attended = torch.ones_like(p, dtype=torch.bool) if bias is None else bias > -math.inf
        any_head = attended.any(2)
        coarse = (any_head & (role == ROLE["coarse"])).sum(-1)
        exact = attended & torch.isin(role, torch.tensor(EXACT, device=role.device))[:, :, None]
        out = {
            "roles": roles.flatten(1, 2), "span_mass": spans.flatten(1, 2), "entropy": entropy.flatten(1, 2),
            "tokens": any_head.sum(-1) - coarse, "coarse": coarse,
        }  # fmt: skip
        if self._shadow is not None:
            where = hot.position[pick, :, :live].clamp(min=0).long()[:, :, None].expand_as(exact)
            covered = torch.zeros(*rows, self._shadow.shape[2], dtype=torch.float32, device=p.device)
            covered.scatter_reduce_(-1, where, exact.float(), "amax")
            out["covered"] = covered
        return out

    def _head_columns(self, measured: dict[str, torch.Tensor], position: int) -> dict[str, np.ndarray]:
        roles = measured["roles"]
        columns = {name: roles[..., code] for code, name in enumerate(MASS_COLUMNS)}
        self._worst_mass = max(self._worst_mass, float((roles[..., : len(ROLES)].sum(-1) - 1).abs().max()))
        columns["entropy"] = measured["entropy"]
        q = torch.stack([seen.q for seen in self._seen]).float()
        if self._previous is not None:
            columns["qcos"] = torch.cosine_similarity(q, self._previous, dim=-1)
        self._previous = q
        if all(seen.zoomed is not None for seen in self._seen):
            zoomed = torch.stack([seen.zoomed.flatten() for seen in self._seen if seen.zoomed is not None]).float()
            zoomable = torch.stack([seen.zoomable for seen in self._seen if seen.zoomable is not None]).float()
            columns["n_zoomed"] = zoomed
            columns["zoom_rate"] = torch.where(zoomable[:, None] > 0, zoomed / zoomable[:, None].clamp(min=1), torch.nan)
        if self._shadow is not None:
            columns["coverage"] = self._coverage(q, measured["covered"], position)
        return {name: column.numpy(force=True).astype(np.float32) for name, column in columns.items()}

    def _coverage(self, q: torch.Tensor, covered: torch.Tensor, position: int) -> torch.Tensor:
        """Share of full attention's mass [L, Hq] on the positions attended exactly; the step's own token is read from its slot."""
        assert self._shadow is not None
        self._shadow[:, :, position] = self.memory.hot.keys[:, :, self.memory.hot.window_slot(position)]
        n = position + 1
        full = attention_weights(q, self._shadow[:, :, :n], None, self._seen[0].scaling)
        return (full * covered[..., :n]).sum(-1).flatten(1, 2)

    def _kv_columns(self, measured: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        shape = self.memory.shape
        size = (shape.layers, shape.kv_heads)
        moved = {"h2d": np.zeros(size), "d2h": np.zeros(size)}
        for entry in self.memory.ledger.opened:
            if entry.kv_head is None:
                moved[entry.direction][entry.layer] += entry.bytes // shape.kv_heads
            else:
                moved[entry.direction][entry.layer, entry.kv_head] += entry.bytes
        for direction, table in moved.items():
            self._kv_bytes[direction] += round(table.sum())
        # Every (layer, KV head) has the same slots; tables and a method's index tensors count as equal shares, rounded down.
        held = self.memory.account.resident // (shape.layers * shape.kv_heads)
        return {
            "h2d_bytes": moved["h2d"], "d2h_bytes": moved["d2h"], "resident_bytes": np.full(size, held),
            "attended_tokens": measured["tokens"].numpy(force=True).astype(float),
            "attended_coarse": measured["coarse"].numpy(force=True).astype(float),
            "n_recalled": np.array([seen.fetched for seen in self._seen], float),
            "n_reused": np.array([seen.reused for seen in self._seen], float),
        }  # fmt: skip

    def _count_rows(self, rows: list[Any]) -> None:
        for row in rows:
            self._row_bytes[row.direction] += row.bytes

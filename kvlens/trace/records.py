"""A checked trace as the typed records of a run, in the order in which a run logs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvlens.decisions import Decisions
from kvlens.instruments import CutRow, Effects, Loss, Oracle, Scores
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, EventRow, JournalRow, SpanHeadRow, SpanRow, TransferRow
from kvlens.trace.bystep import BETWEEN, RowsByStep
from kvlens.trace.cells import numbers
from kvlens.trace.check import Checked
from kvlens.trace.decisionrows import decisions_of
from kvlens.trace.ownrows import cut_of, effects_of, phases_of, prompt_tokens, span_keys_of
from kvlens.trace.tables import TABLES

_MASSES = ("full_mass", "mass", "unread", "reference_mass", "reference_unread")
_REASON = "The trace gives no reason."


class Records:
    """Records of a trace. Tables that it lacks give rows that were not recorded."""

    def __init__(self, checked: Checked) -> None:
        self.head, self.prompt, self._whole = checked.head, checked.prompt, checked.tables
        self._tables = {name: RowsByStep(name, table) for name, table in checked.tables.items()}
        self._shapes = {"q_head": self.head.q_heads, "kv_head": self.head.kv_heads}

    def prefill(self) -> PrefillRecord:
        """What is known when prefill has ended."""
        head = self.head
        return PrefillRecord(
            tokens=list(prompt_tokens(self._rows("token"), self._tables["token"].table.column_names)),
            spans=self._spans(BETWEEN),
            span_heads=self._span_heads(BETWEEN),
            transfers=self._transfers(BETWEEN),
            events=self._events(BETWEEN),
            prefill_us=head.prefill_us,
            prefill_peak_bytes=head.prefill_peak_bytes,
            cold_bytes=head.prefill_cold_bytes,
            resident_bytes=head.prefill_resident_bytes,
            journal=self._journal(BETWEEN),
            decisions=self._decisions(BETWEEN),
            cuts=self._cuts(BETWEEN),
            span_keys=span_keys_of(self._whole.get("span_key"), head),
        )

    def steps(self) -> Iterator[StepRecord]:
        """Every step, in order."""
        tokens = {int(row["step"]): row for row in self._rows("token") if row["step"] is not None}
        for step in range(self.head.steps):
            (times,) = self._rows("step", step)
            token = tokens[step]
            head = self._grids("head_step", step, HEAD_COLUMNS, np.float32)
            spans, mass, _ = self._lists("head_span", step, ("mass",))
            yield StepRecord(
                step=step,
                t_us=times["t_us"],
                dur_us=times["dur_us"],
                wait_us=times["wait_us"],
                record_us=times["record_us"],
                token_id=token["token_id"],
                text=token["text"],
                logprob=token["logprob"],
                next_entropy=token["next_entropy"],
                resident_bytes=times["resident_bytes"],
                peak_bytes=times["peak_bytes"],
                cold_bytes=times["cold_bytes"],
                head=head,
                kv=self._grids("kv_step", step, KV_COLUMNS, np.float64),
                top_span=spans,
                top_mass=mass["mass"],
                tail_mass=self._tail("head_span", step, "tail_mass"),
                transfers=self._transfers(step),
                tells_transfers="transfer" in self._tables,
                events=self._events(step),
                spans=self._spans(step),
                span_heads=self._span_heads(step),
                journal=self._journal(step),
                scores=self._scores(step),
                loss=self._loss(step),
                oracle=self._oracle(step),
                decisions=self._decisions(step),
                cuts=self._cuts(step),
                phases=phases_of(self._rows("phase", step)),
            )

    def effects(self) -> Effects | None:
        """Return what spans did to the lost choices; None: not recorded."""
        return effects_of(self._whole.get("effect"), self.head.effect_steps)

    # ---- rows
    def _rows(self, name: str, step: int | None = None) -> list[dict[str, Any]]:
        """Rows of a table as mappings; columns that it lacks are None."""
        held = self._tables.get(name)
        if held is None:
            return []
        empty = dict.fromkeys(TABLES[name].columns)
        return [empty | row for row in (held.table if step is None else held.at(step)).to_pylist()]

    def _spans(self, step: int) -> list[SpanRow]:
        return [
            SpanRow(
                row["span"],
                row["kind"] or "span",
                row["tok_start"],
                row["tok_end"],
                step,
                row["reason"] or _REASON,
                row["mean_surprisal"],
                row["state"] or "resident",
            )
            for row in self._rows("span", step)
        ]

    def _span_heads(self, step: int) -> list[SpanHeadRow]:
        """Forms of the spans that were born at the step."""
        if "span_head" not in self._tables:
            return []
        return [SpanHeadRow(**row) for span in self._rows("span", step) for row in self._forms.get(span["span"], [])]

    @cached_property
    def _forms(self) -> dict[int, list[dict[str, Any]]]:
        forms: dict[int, list[dict[str, Any]]] = {}
        for row in self._rows("span_head"):
            forms.setdefault(row["span"], []).append(row)
        return forms

    def _transfers(self, step: int) -> list[TransferRow]:
        return [TransferRow(**row) for row in self._rows("transfer", step)]

    def _events(self, step: int) -> list[EventRow]:
        return [EventRow(**row) for row in self._rows("event", step)]

    def _journal(self, step: int) -> list[JournalRow]:
        vectors = self._rows("journal", step)
        return [JournalRow(**(row | {"values": np.array(row["values"], np.float32)})) for row in vectors]

    def _cuts(self, step: int) -> list[CutRow]:
        return [cut_of(row) for row in self._rows("cut", step)]

    def _loss(self, step: int) -> Loss | None:
        for row in self._rows("loss", step):
            values = {name: value for name, value in row.items() if name != "step"}
            figures = ("kl", "ref_logprob", "logprob", "logit_diff")
            return Loss(**values | {name: np.nan for name in figures if values[name] is None})
        return None

    def _decisions(self, step: int) -> Decisions | None:
        held = self._tables.get("decision")
        rows = None if held is None else held.at(step)
        return None if rows is None or not rows.num_rows else decisions_of(rows)

    # ---- arrays
    def _grids(self, name: str, step: int, columns: tuple[str, ...], kind: type) -> dict[str, np.ndarray]:
        """The columns of a table with a row per layer and head that were recorded: [layers, heads]."""
        if name not in self._tables:
            return {}
        rows, head = self._tables[name].at(step), TABLES[name].key[-1]
        place = _places(rows, head)
        grids: dict[str, np.ndarray] = {}
        for column in columns:
            if column in rows.column_names:
                grids[column] = np.full((self.head.layers, self._shapes[head]), np.nan, kind)
                grids[column][place] = numbers(rows[column])
        return grids

    def _tail(self, name: str, step: int, column: str) -> np.ndarray:
        """float32 [layers, query heads] of one column; NaN: not recorded."""
        empty = np.full((self.head.layers, self.head.q_heads), np.nan, np.float32)
        return self._grids(name, step, (column,), np.float32).get(column, empty)

    def _lists(
        self, name: str, step: int, columns: tuple[str, ...], ids: str = "span"
    ) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
        """(ids int32 [layers, heads, K], -1 = none; of each column that was recorded float32 of that shape; rows)."""
        head = TABLES[name].key[-1] if name in TABLES else "q_head"
        held = self._tables.get(name)
        shape = (self.head.layers, self._shapes[head])
        if held is None or ids not in held.table.column_names:
            return np.full((*shape, 0), -1, np.int32), {each: np.zeros((*shape, 0), np.float32) for each in columns}, 0
        rows = held.at(step)
        lengths = np.nan_to_num(numbers(pc.list_value_length(rows[ids]))).astype(np.int64)
        width = held.width(ids)
        layer, heads = (np.repeat(place, lengths) for place in _places(rows, head))
        slot = np.arange(len(layer)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = np.full((*shape, width), -1, np.int32)
        places[layer, heads, slot] = numbers(rows[ids].combine_chunks().flatten())
        arrays = {}
        for column in columns:
            if column in rows.column_names:
                arrays[column] = np.full(places.shape, np.nan, np.float32)
                flat = numbers(rows[column].combine_chunks().flatten())
                if len(flat) == len(layer):
                    arrays[column][layer, heads, slot] = flat
        return places, arrays, rows.num_rows

    def _scores(self, step: int) -> Scores | None:
        spans, values, rows = self._lists("kv_span", step, ("score", "chosen"))
        if not rows:
            return None
        counts = self._grids("kv_span", step, ("n_candidates",), np.float64)["n_candidates"]
        candidates = np.nan_to_num(counts).astype(np.int64)
        return Scores(spans, values["score"], np.nan_to_num(values["chosen"]) > 0, candidates)

    def _oracle(self, step: int) -> Oracle | None:
        spans, values, rows = self._lists("oracle", step, _MASSES)
        if not rows:
            return None
        lost, lost_mass, lost_rows = self._lists("oracle", step, ("lost_mass",), "lost_pos")
        whole = {name: mass for name, mass in values.items() if not np.isnan(mass[spans >= 0]).any()}
        reference, unread = whole.get("reference_mass"), whole.get("unread")
        own_lost, own_mass, own_rows = self._lists("oracle", step, ("reference_lost_mass",), "reference_lost_pos")
        listed = reference is not None and own_rows and own_lost.shape[-1]
        return Oracle(
            spans,
            values["full_mass"],
            values["mass"],
            self._tail("oracle", step, "tail_full"),
            unread=unread,
            lost_pos=lost if lost_rows else None,
            lost_mass=lost_mass["lost_mass"] if lost_rows else None,
            reference=reference,
            tail_reference=None if reference is None else self._tail("oracle", step, "tail_reference"),
            reference_unread=whole.get("reference_unread"),
            reference_lost_pos=own_lost if listed else None,
            reference_lost_mass=own_mass["reference_lost_mass"] if listed else None,
        )


def _places(rows: pa.Table, head: str) -> tuple[np.ndarray, np.ndarray]:
    return numbers(rows["layer"]).astype(np.int64), numbers(rows[head]).astype(np.int64)

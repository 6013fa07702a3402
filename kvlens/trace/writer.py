"""Writer of the open trace format, version 3: copy this file into an engine. It needs numpy and pyarrow, not kvlens.

A trace is a folder of Parquet files and one trace.json, which lists the files of committed steps. A process that is
killed leaves the committed steps readable. docs/trace-format.md of kvlens has the tables and columns.

    writer = Writer("trace", layers=32, q_heads=32, kv_heads=8, engine="my engine 1.0", method="top-k pages")
    writer.prompt(ids, texts)
    writer.span(0, 0, 16, kind="page")
    for every decode step:
        writer.attention(weights, full=full_weights)
        writer.compare(logits, full_logits, text_of_token)
        writer.step(token, text, t_us=..., dur_us=..., resident_bytes=..., peak_bytes=...)
    writer.close(output_text=...)
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FORMAT, VERSION = "kvlens-trace", 3
Mth = TypeVar("Mth", bound=Callable[..., Any])
LISTED = 16
"""spans listed per query head and step"""
LOST = 8
"""unread positions listed per query head and step"""


def _timed(method: Mth) -> Mth:
    """Add the method's time to `spent_s`, once where methods call each other."""

    @functools.wraps(method)
    def timed(self: Writer, *args: Any, **columns: Any) -> Any:
        outer, start_time = self._inside, time.perf_counter()
        self._inside = True
        try:
            return method(self, *args, **columns)
        finally:
            self._inside = outer
            if not outer:
                self.spent_s += time.perf_counter() - start_time

    return timed  # type: ignore[return-value]


class Writer:
    """A trace of one request. `spent_s` is the time spent in it so far, in seconds."""

    def __init__(
        self,
        folder: str | Path,
        *,
        layers: int,
        q_heads: int,
        kv_heads: int,
        engine: str,
        block: int = 32,
        **about: Any,
    ) -> None:
        """block: steps committed at once. about: other keys of trace.json (model, method, budget, answer, needle, ...).
        Raises FileExistsError if the folder holds a trace."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "trace.json").exists():
            raise FileExistsError(f"{self.folder} holds a trace: choose another folder.")
        created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        self.head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "engine": engine, "created": created}
        self.head |= {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads, "steps": 0, "complete": False}
        self.head |= {"tables": {}, **about}
        self.layers, self.q_heads, self.kv_heads, self.block = layers, q_heads, kv_heads, block
        self.steps = 0
        """steps logged so far, which is the number of the next one"""
        self.positions = 0
        self.spent_s = 0.0
        self._spent_before_step, self._inside = 0.0, False
        pa.array(np.zeros(1))  # the first conversion loads pandas where it is installed, which is no step's time
        self._spans: list[tuple[int, int, int, str]] = []
        self._pending: dict[str, list[dict[str, Any]]] = {}

    # ---- rows
    @_timed
    def prompt(self, ids: Sequence[int], texts: Sequence[str], **columns: Any) -> None:
        """Log the prompt's tokens, once. columns: lists of one value per token (char_start, char_end, surprisal)."""
        places = np.arange(self.positions, self.positions + len(ids))
        self._put("token", {"pos": places, "token_id": list(ids), "text": list(texts), **columns})
        self.positions += len(ids)

    @_timed
    def span(self, span: int, tok_start: int, tok_end: int, kind: str = "page", **columns: Any) -> None:
        """Log a span of tokens [tok_start, tok_end). The span of kind `window` has every token that no other span has,
        whatever its range. columns: state, reason, born_step (None: the end of prefill)."""
        columns = {"born_step": self.steps if self.steps else -1, **columns}
        self._spans.append((span, tok_start, tok_end, kind))
        self.row("span", span=span, tok_start=tok_start, tok_end=tok_end, kind=kind, **columns)

    @_timed
    def row(self, table: str, **columns: Any) -> None:
        """Log one row of a table, with its own `step` where the table has one: -1 is the end of prefill."""
        self._put(table, {name: [value] for name, value in columns.items()})

    @_timed
    def span_keys(self, spans: Sequence[int], keys: np.ndarray, form: str = "post-rope") -> None:
        """Log the mean key of each span's prompt tokens, once. keys: float [layers, KV heads, spans, head size]. form:
        post-rope, or pre-rope where the rotary embedding was taken back before the mean."""
        keys = np.asarray(keys, np.float32)
        heads, count, size = self.layers * self.kv_heads, len(spans), keys.shape[-1]
        if keys.shape[:3] != (self.layers, self.kv_heads, count):
            raise ValueError(f"keys has shape {keys.shape}, not [{self.layers}, {self.kv_heads}, {count}, ...]")
        layer = np.repeat(np.arange(self.layers), self.kv_heads * count)
        kv_head = np.tile(np.repeat(np.arange(self.kv_heads), count), self.layers)
        offsets = pa.array(size * np.arange(heads * count + 1, dtype=np.int32))
        lists = pa.ListArray.from_arrays(offsets, self._array(keys.reshape(-1)))
        rows = {"layer": layer, "kv_head": kv_head, "span": np.tile(spans, heads), "form": [form] * heads * count}
        self._put("span_key", {**rows, "key": lists})

    @_timed
    def grid(self, table: str, **columns: np.ndarray) -> None:
        """Log the step's rows of a table with one row per layer and head. columns: arrays [layers, heads], or
        [layers, heads, n] for lists, in which ids of -1 and their neighbours are left out. NaN: not recorded."""
        heads = self.kv_heads if table in ("kv_step", "kv_span") else self.q_heads
        name = "kv_head" if heads == self.kv_heads and table in ("kv_step", "kv_span") else "q_head"
        size = self.layers * heads
        keys: dict[str, Any] = {"step": np.full(size, self.steps), "layer": np.repeat(np.arange(self.layers), heads)}
        keys[name] = np.tile(np.arange(heads), self.layers)
        for column, values in columns.items():
            array = np.asarray(values)
            if array.shape[:2] != (self.layers, heads):
                raise ValueError(f"{table}.{column} has shape {array.shape}, not [{self.layers}, {heads}, ...]")
            ids = np.asarray(columns["lost_pos" if column.startswith("lost_") else "span"]) if array.ndim == 3 else None
            keys[column] = array.reshape(-1) if ids is None else self._lists(array, ids)
        self._put(table, keys)

    # ---- what a step attended and lost
    @_timed
    def attention(self, weights: np.ndarray, full: np.ndarray | None = None, **columns: np.ndarray) -> None:
        """Log the step's head_step and head_span, and with `full` its oracle. weights: attention by position, float
        [layers, query heads, positions], 0 where a head did not attend. full: the same of full attention by the same
        queries. columns: other columns of head_step."""
        weights, entropy = np.asarray(weights, np.float32), np.zeros(np.shape(weights)[:2], np.float32)
        np.subtract(entropy, (weights * np.log(np.maximum(weights, 1e-20))).sum(-1), out=entropy)
        ids, kinds, mass = self._by_span(weights)
        roles = {"mass_sink": kinds == "sink", "mass_window": kinds == "window"}
        head = {name: mass[..., spans].sum(-1) for name, spans in roles.items()}
        head["mass_resident"] = mass[..., ~(roles["mass_sink"] | roles["mass_window"])].sum(-1)
        top, listed = self._top(mass, ids)
        tail = np.clip(mass.sum(-1) - np.take_along_axis(mass, top, -1).sum(-1), 0, 1)
        if full is not None:
            read = weights > 0
            full = np.asarray(full, np.float32)
            missed = np.where(read, 0, full)
            _, _, full_mass = self._by_span(full)
            _, _, unread = self._by_span(missed)
            head["coverage"], head["unread"] = (full * read).sum(-1), missed.sum(-1)
            head["regret"] = np.maximum(0, full_mass - mass).sum(-1)
            best, best_ids = self._top(full_mass, ids)
            places = np.argsort(-missed, -1, kind="stable")[..., :LOST]
            lost = np.take_along_axis(missed, places, -1)
            shares = {"full_mass": full_mass, "mass": mass, "unread": unread}
            lists = {name: np.clip(np.take_along_axis(values, best, -1), 0, 1) for name, values in shares.items()}
            tail_full = np.clip(full_mass.sum(-1) - lists["full_mass"].sum(-1), 0, 1)
            lost_pos = np.where(lost > 0, places, -1)
            self.grid("oracle", span=best_ids, tail_full=tail_full, lost_pos=lost_pos, lost_mass=lost, **lists)
        self.grid("head_step", entropy=entropy, **{name: np.clip(v, 0, 1) for name, v in head.items()}, **columns)
        top_mass = np.clip(np.take_along_axis(mass, top, -1), 0, 1)
        self.grid("head_span", span=np.where(top_mass > 0, listed, -1), mass=top_mass, tail_mass=tail)

    @_timed
    def compare(self, logits: np.ndarray, full: np.ndarray, text: Callable[[int], str]) -> None:
        """Log the step's loss: the method's logits and those of full KV for the same tokens, float [vocabulary]. text:
        a token's text. Log it up to the first step at which the two choose differently."""
        method, reference = (self._log_softmax(values) for values in (logits, full))
        ref, top = int(reference.argmax()), int(method.argmax())
        finite = np.isfinite(reference)
        self.row(
            "loss",
            step=self.steps,
            ref_token=ref,
            ref_text=text(ref),
            top_token=top,
            top_text=text(top),
            agrees=ref == top,
            kl=float((np.exp(reference[finite]) * (reference[finite] - method[finite])).sum()),
            ref_logprob=float(reference[ref]),
            logprob=float(method[ref]),
            logit_diff=float(np.float64(logits[ref]) - np.float64(full[ref])),
            ref_rank=int((method > method[ref]).sum()),
        )

    @_timed
    def step(
        self, token_id: int, text: str, *, t_us: int, dur_us: int, resident_bytes: int, peak_bytes: int, **columns: Any
    ) -> None:
        """End the step: log the token that it chose, its times and its bytes. columns: logprob and next_entropy of the
        token, cold_bytes and wait_us of the step. record_us is the writer's own time."""
        record_us = columns.pop("record_us", int(1e6 * (self.spent_s - self._spent_before_step)))
        of_token = {name: columns.pop(name) for name in ("logprob", "next_entropy") if name in columns}
        self.row("token", pos=self.positions, token_id=token_id, text=text, step=self.steps, **of_token)
        times = {"t_us": int(t_us), "dur_us": int(dur_us), "record_us": record_us}
        sizes = {"resident_bytes": int(resident_bytes), "peak_bytes": int(peak_bytes)}
        self.row("step", step=self.steps, **times, **sizes, **columns)
        self.steps += 1
        self.positions += 1
        self._spent_before_step = self.spent_s
        if self.steps % self.block == 0:
            self.commit()

    # ---- files
    @_timed
    def commit(self) -> None:
        """Write the pending rows, then name their files in trace.json. Call it between steps."""
        for table, parts in self._pending.items():
            files = self.head["tables"].setdefault(table, [])
            name = f"{table}-{len(files):06d}.parquet"
            pieces = [pa.table({column: self._array(values) for column, values in part.items()}) for part in parts]
            whole = pa.concat_tables(pieces, promote_options="permissive")
            pq.write_table(whole, self.folder / name, compression="zstd")
            files.append(name)
        self._pending = {}
        self.head["steps"] = self.steps
        draft = self.folder / ".trace.json"
        draft.write_text(json.dumps(self.head, ensure_ascii=False, indent=1), encoding="utf-8")
        os.replace(draft, self.folder / "trace.json")

    @_timed
    def close(self, **about: Any) -> None:
        """End the trace; rows of a step that did not end are left out. about: keys of trace.json that are known now
        (output_text, stopped, ...)."""
        for table, parts in self._pending.items():
            steps = [part.get("step", part.get("born_step", [-1]))[0] for part in parts]
            self._pending[table] = [part for part, step in zip(parts, steps, strict=True) if step != self.steps]
        self._pending = {table: parts for table, parts in self._pending.items() if parts}
        self.head |= {"complete": True, **about}
        self.commit()

    # ---- arrays
    def _put(self, table: str, columns: dict[str, Any]) -> None:
        self._pending.setdefault(table, []).append(columns)

    @staticmethod
    def _array(values: Any) -> pa.Array:
        """NaN becomes NULL."""
        if isinstance(values, pa.Array):
            return values
        if isinstance(values, np.ndarray):
            return pa.array(values, mask=np.isnan(values) if values.dtype.kind == "f" else None)
        return pa.array([None if isinstance(value, float) and value != value else value for value in values])

    @staticmethod
    def _lists(values: np.ndarray, ids: np.ndarray) -> pa.Array:
        present = ids >= 0
        offsets = np.concatenate(([0], np.cumsum(present.sum(-1).reshape(-1)))).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), Writer._array(values[present]))

    def _by_span(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the spans' ids [S], their kinds [S] and the sums of `values` [..., positions] over each [..., S]."""
        ids, starts, ends, kinds = (np.array(part) for part in zip(*self._spans, strict=True))
        sums = np.concatenate((np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1, dtype=np.float64)), -1)
        last = values.shape[-1]
        mass = sums[..., np.minimum(ends, last)] - sums[..., np.minimum(starts, last)]
        window = kinds == "window"
        if window.any():
            mass[..., window.argmax()] = sums[..., -1] - mass[..., ~window].sum(-1)
        return ids, kinds, mass

    @staticmethod
    def _top(mass: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-mass, -1, kind="stable")[..., :LISTED]
        return order, ids[order]

    @staticmethod
    def _log_softmax(logits: np.ndarray) -> np.ndarray:
        values = np.asarray(logits, np.float64)
        shifted = values - values.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))

"""Decode steps of several runs, computed together: the model's own layers once for all runs, attention run by run.

Each run keeps its session, method, memory and recorder. A linear layer reads its weights once for b rows, so a step of
b runs costs less than b steps. Rows of a batch round otherwise than a row alone, as everywhere: the sums of a product
are taken in another order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvlens.engine.hf_attention import SessionLayer
from kvlens.engine.models import LoadedModel
from kvlens.engine.rotary import changing_type
from kvlens.engine.session import Session
from kvlens.kernels.attend import LayerForm
from kvlens.refusal import Refusal


class Row:
    """A run's part of a step that is computed with others."""

    def __init__(self, loaded: LoadedModel, session: Session, token: int) -> None:
        self.loaded, self.session, self.token = loaded, session, token
        self.logits: torch.Tensor | None = None
        """[1, V]; None: the step is not computed, or failed"""
        self.error: BaseException | None = None
        """what the step raised for this run"""
        self.rows = 0
        """runs whose steps were computed with it, its own included"""
        self.took_ns = 0
        """of the step for all runs"""
        self.done = False
        """the step is computed, or failed"""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The run's session takes its new token [H_kv, 1, D]."""
        self._guard(self.session.write, layer, keys, values)

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the run's attention [1, Hq, 1, D]; zeros once the run has failed."""
        output: torch.Tensor | None = self._guard(self.session.attend, layer, q, scaling)
        return torch.zeros_like(q) if output is None else output

    def _guard(self, call: Callable[..., Any], *values: Any) -> Any:
        """Keep what one run raises from the other runs."""
        if self.error is None:
            try:
                return call(*values)
            except BaseException as error:
                self.error = error
        return None


class BatchSession:
    """Takes the place of a session (kvlens.engine.hf_attention.LayerSession) and gives each row to the row's own
    session. A row is a copy: what a method keeps of it is as large as in a run alone."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values [b, H_kv, 1, D]."""
        for number, row in enumerate(self._rows):
            row.write(layer, keys[number].clone(), values[number].clone())

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [b, Hq, 1, D] -> attention output of the same shape."""
        parts = zip(self._rows, q.split(1), strict=True)
        return torch.cat([row.attend(layer, part.clone(), scaling) for row, part in parts])

    def form(self, layer: int) -> LayerForm:
        """See Session."""
        return self._rows[0].session.form(layer)

    def tokens_seen(self, layer: int) -> int:
        """Return the largest count of any row; positions are given with the tokens."""
        return max(row.session.tokens_seen(layer) for row in self._rows)


class BatchLayer(SessionLayer):
    """A cache layer whose rows are runs: it hands the keys and values of all rows to its session."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SessionLayer."""
        self.session.write(self.layer, key_states, value_states)
        key_states.kvlens_session = self.session  # type: ignore[attr-defined]
        return key_states, value_states


class StepBatch:
    """The steps that runs wait for, until they are computed together. One thread at a time uses it."""

    def __init__(self) -> None:
        self._waiting: list[Row] = []
        self.passes: Counter[int] = Counter()
        """number of rows -> steps that had so many"""

    def add(self, row: Row) -> None:
        """Let a run wait for its step."""
        self._waiting.append(row)

    def compute(self) -> None:
        """Compute the steps of all runs that wait, those of one model together."""
        rows, self._waiting = self._waiting, []
        for loaded in {id(row.loaded): row.loaded for row in rows}.values():
            self._forward(loaded, [row for row in rows if row.loaded is loaded])

    def _forward(self, loaded: LoadedModel, rows: Sequence[Row]) -> None:
        model, start_ns = loaded.model, time.perf_counter_ns()
        try:
            session = BatchSession(rows)
            cache = Cache(layers=[BatchLayer(session, layer) for layer in range(loaded.shape.layers)])
            tokens = torch.tensor([[row.token] for row in rows], device=model.device)
            positions = torch.tensor([[row.session.tokens_seen(0)] for row in rows], device=model.device)
            logits = model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            for row, part in zip(rows, logits.split(1), strict=True):
                row.logits = part
        except BaseException as error:
            for row in rows:
                row.error = row.error or error
        finally:
            self.passes[len(rows)] += 1
            took_ns = time.perf_counter_ns() - start_ns
            for row in rows:
                row.rows, row.took_ns, row.done = len(rows), took_ns, True


class Seat:
    """A run's place in a batch. Its engine computes steps through it."""

    def __init__(self, batch: StepBatch, pause: Callable[[], None]) -> None:
        """pause: lets the other runs work until each waits for its step or has ended."""
        self.batch, self._pause = batch, pause

    def check(self, loaded: LoadedModel) -> None:
        """Raise Refusal `batch_rotary` for a model whose rotary frequencies follow the length of one text."""
        if changing_type(loaded.model.config) is not None:
            raise Refusal(
                "the model's rotary frequencies depend on the length of each text, so its prompts cannot share steps: "
                "set batch to 1.",
                code="batch_rotary",
            )

    def step(self, loaded: LoadedModel, session: Session, token: int) -> tuple[torch.Tensor, int, int]:
        """Return logits [1, V], the nanoseconds that the runs' common step took, and the number of these runs. Raises
        what this run's hooks raised in it."""
        row = Row(loaded, session, token)
        self.batch.add(row)
        while not row.done:
            self._pause()
            if not row.done:  # all others wait
                self.batch.compute()
        if row.error is not None:
            raise row.error
        assert row.logits is not None
        return row.logits, row.took_ns, row.rows

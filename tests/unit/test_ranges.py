"""A figure outside its range ends the run before it is recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.memory.placement import Selection
from kvlens.methods.faults import FIGURE, OUTPUT, MethodFault
from kvlens.methods.full import FullKV
from kvlens.recording.selfcheck import TOLERANCE, check_figures
from kvlens.records import StepRecord
from kvlens.text.prompts import PromptText, tokenize


def step(**changes: Any) -> StepRecord:
    """A step of a run with 2 layers, 4 query heads and 2 KV heads."""
    head = {"coverage": np.full((2, 4), 0.5), "regret": np.full((2, 4), np.nan), "qcos": np.full((2, 4), -1.0)}
    kv = {"read_bytes": np.full((2, 2), 64.0), "similarity": np.full((2, 2), 1.0)}
    sizes = {"resident_bytes": 100, "peak_bytes": 100, "cold_bytes": 0}
    top = {"top_span": np.zeros((2, 4, 1), int), "top_mass": np.ones((2, 4, 1)), "tail_mass": np.zeros((2, 4))}
    times = {"t_us": 0, "dur_us": 1, "wait_us": 0, "record_us": 0}
    token = {"token_id": 0, "text": "", "logprob": -1.0, "next_entropy": 0.0}
    record = StepRecord(step=3, head=head, kv=kv, **times, **token, **sizes, **top)
    for name, value in changes.items():
        table = next((columns for columns in (head, kv) if name in columns), None)
        if table is None:
            record = dataclasses.replace(record, **{name: value})
        else:
            table[name][1, 1] = value
    return record


def test_good_figures_pass() -> None:
    check_figures("mine", step())
    check_figures("mine", step(coverage=1 + TOLERANCE / 2))


WRONG = [("coverage", 57.2), ("coverage", -0.1), ("regret", 1.5), ("qcos", -1.1), ("read_bytes", -4.0)]


@pytest.mark.parametrize(("name", "value"), [*WRONG, ("similarity", 2.0), ("coverage", np.inf)])
def test_a_wrong_figure_is_named_with_its_layer(name: str, value: float) -> None:
    with pytest.raises(MethodFault) as raised:
        check_figures("mine", step(**{name: value}))
    error = raised.value
    assert (error.code, error.method, error.layer, error.step) == (FIGURE, "mine", 1, 3)
    assert name in error.problem
    assert error.actual == f"{value:g}"


def test_a_wrong_mass_and_a_wrong_size_are_refused() -> None:
    for changes in ({"top_mass": np.full((2, 4, 1), 1.2)}, {"cold_bytes": -1}):
        with pytest.raises(MethodFault) as raised:
            check_figures("mine", step(**changes))
        assert raised.value.code == FIGURE


class Sink:
    """Counts the steps that reach it."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def prefill(self, record: object) -> None:
        """Take the prompt."""

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)


def logging(**fields: Any) -> type[FullKV]:
    """Full KV whose selection reads everything and has these fields."""

    def select(self: Any, layer: int, q: torch.Tensor) -> Selection:
        shape, spans = self.context.shape, self.ids
        fine = torch.ones(shape.kv_heads, shape.group, spans, dtype=torch.bool)
        made = {name: value(shape) if callable(value) else value for name, value in fields.items()}
        return Selection(fine, torch.full((shape.kv_heads, 1), -1), **made)

    def prefill_end(self: Any, prompt: Any) -> Any:
        layout, placement = FullKV.prefill_end(self, prompt)
        self.ids = layout.span_capacity
        return layout, placement

    return type("Logging", (FullKV,), {"name": "logging", "select": select, "prefill_end": prefill_end})


def test_a_column_that_a_method_fills_wrongly_ends_the_run() -> None:
    loaded, sink = load("demo", "cpu"), Sink()
    prompt = tokenize(PromptText("The river is wide. " * 8), loaded.tokenizer, loaded.max_positions, 4)
    method = logging(head_columns=lambda shape: {"corrected": torch.full((shape.q_heads,), 57.2)})
    with pytest.raises(MethodFault) as raised:
        Engine(loaded).run(prompt, method, method.Parameters(), None, Options(max_new=3), sink)
    assert (raised.value.code, raised.value.hook, raised.value.actual) == (FIGURE, "select", "57.2")
    assert sink.steps == []


@pytest.mark.parametrize("size", [-1, 0.5, None])
def test_index_bytes_that_are_no_size_are_refused(size: object) -> None:
    with pytest.raises(MethodFault) as raised:
        Trial(logging(index_bytes=size), 40, 2).step(0)
    assert (raised.value.code, raised.value.hook, raised.value.actual) == (OUTPUT, "select", repr(size))
    Trial(logging(index_bytes=SHAPE.head_dim), 40, 2).step(0)

"""The lies of plugin_lies.py: full KV with one hook that does not keep to its contract."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlens.memory.placement import Selection
from kvlens.methods.clusterkv import ClusterKV
from kvlens.methods.full import FullKV
from kvlens.methods.needs import Needs

IN_PLACE, LATER, FIGURES, HIDES, ENDS, HANGS = (
    "changes its input",
    "changes its input later",
    "returns a wrong figure",
    "hides tensors",
    "ends the process",
    "hangs",
)
Way = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Lie:
    """One lie: the hook that tells it, and what it does there."""

    kind: str
    words: str
    hook: str
    act: Callable[..., Any]
    """act(method, *arguments of the hook): returns what the hook returns if `answers`"""
    answers: bool = False
    needs: Needs = field(default_factory=lambda: Needs(queries=8))
    base: type[Any] = FullKV
    """the method that tells the truth otherwise"""
    keeps: bool = False
    """the method keeps the prompt that it was handed"""
    undo: Callable[[], None] = lambda: None

    def method(self) -> type[Any]:
        """Return the class that tells it."""
        lie = self

        class Liar(self.base):  # type: ignore[misc, name-defined]
            name = title = "liar"
            needs = lie.needs

            def prefill_end(self, prompt: Any) -> Any:
                placed = super().prefill_end(prompt)
                self.prompt, self.span_ids = (prompt if lie.keeps else None), placed[0].span_capacity
                return placed

        def hook(method: Any, *arguments: Any) -> Any:
            answer = lie.act(method, *arguments)
            return answer if lie.answers else getattr(super(Liar, method), lie.hook)(*arguments)

        if self.hook == "prefill_end":
            Liar.prefill_end = hook  # type: ignore[method-assign, assignment]
        else:
            setattr(Liar, self.hook, hook)
        return Liar

    def restore(self) -> None:
        """Take back what the lie did to anything but its run."""
        self.undo()


WEIGHTS, INPUTS = Needs(weights=True), Needs(queries=8, inputs=True)


def _no_grad_view(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = 7


def _numpy(tensor: torch.Tensor) -> None:
    tensor.numpy().fill(3)


def _data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def _set(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros_like(tensor))  # type: ignore[call-overload]


def _flip(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.flip(-2))


WAYS: dict[str, Way] = {
    "`mul_(3)`": lambda tensor: tensor.mul_(3),
    "`.data.mul_(2)`": _data,
    "`.numpy().fill(3)`": _numpy,
    "a view under `no_grad`": _no_grad_view,
    "`set_`": _set,
}


def _in_place() -> list[Lie]:
    lies = [
        Lie(
            IN_PLACE,
            "`weights.zero_(); position.fill_(-1)` in `attended`",
            "attended",
            lambda method, layer, heads, weights, position: (weights.zero_(), position.fill_(-1)),
            needs=WEIGHTS,
        ),
        Lie(
            IN_PLACE,
            "`prompt.values.mul_(-1)` in `prefill_end`",
            "prefill_end",
            lambda method, prompt: prompt.values.mul_(-1),
        ),
        Lie(
            IN_PLACE,
            "tokens of `prompt.keys` in another order, in `prefill_end`",
            "prefill_end",
            lambda method, prompt: _flip(prompt.keys),
        ),
        Lie(
            IN_PLACE,
            "`memory.spans.lengths.fill_(9)` in `decode_end`",
            "decode_end",
            lambda method, end, memory: memory.spans.lengths.fill_(9),
        ),
    ]
    for words, way in WAYS.items():

        def on_weights(method: Any, layer: Any, heads: Any, weights: Any, position: Any, way: Way = way) -> None:
            way(weights)

        def on_select(method: Any, layer: Any, q: Any, way: Way = way) -> None:
            way(q)

        def on_written(method: Any, layer: Any, keys: Any, values: Any, way: Way = way) -> None:
            way(values)

        def on_prompt(method: Any, prompt: Any, way: Way = way) -> None:
            way(prompt.keys)

        lies += [
            Lie(IN_PLACE, f"{words} on the weights in `attended`", "attended", on_weights, needs=WEIGHTS),
            Lie(IN_PLACE, f"{words} on the queries in `select`", "select", on_select),
            Lie(IN_PLACE, f"{words} on the prompt's keys in `prefill_end`", "prefill_end", on_prompt),
        ]
        if words != "a view under `no_grad`":  # a token's values are no view of one block
            lies.append(Lie(IN_PLACE, f"{words} on the token's values in `written`", "written", on_written))
    return lies


def _model_weights() -> list[Lie]:
    """Changes of the model's own weights, which the next run would meet."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def change(way: Way) -> Callable[..., None]:
        def act(method: Any, prompt: Any) -> None:
            weight = next(prompt.inputs.modules[0].parameters())
            saved.append((weight, weight.detach().clone()))
            way(weight)

        return act

    def restore() -> None:
        while saved:
            weight, copy = saved.pop()
            with torch.inference_mode(False), torch.no_grad():
                weight.copy_(copy)

    ways: dict[str, Way] = {"`mul_(3)`": lambda weight: weight.mul_(3), "`.data.mul_(2)`": _data}
    return [
        Lie(
            IN_PLACE,
            f"{words} on the model's weights in `prefill_end`",
            "prefill_end",
            change(way),
            needs=INPUTS,
            undo=restore,
        )
        for words, way in ways.items()
    ]


def _later() -> list[Lie]:
    """A tensor that is kept in one hook and changed in another."""

    def in_held(method: Any) -> None:
        method.prompt.keys.zero_()

    def in_select(method: Any, layer: int, q: torch.Tensor) -> None:
        method.prompt.values.zero_()

    def queries_in_attended(method: Any, layer: int, heads: Any, weights: Any, position: Any) -> None:
        method.queries.mul_(3)

    def keep_queries(method: Any, layer: int, q: torch.Tensor) -> None:
        method.queries = q

    class Two(Lie):
        """A lie that keeps the queries of `select` first."""

        def method(self) -> type[Any]:
            method = super().method()
            method.select = keep_queries  # type: ignore[attr-defined]
            return method

    queries = "queries of `select` times 3 in `attended`"
    return [
        Lie(LATER, "keys of `prefill_end` set to 0 in `held`", "held", in_held, keeps=True),
        Lie(LATER, "values of `prefill_end` set to 0 in `select`", "select", in_select, keeps=True),
        Lie(LATER, "the same under a method that offloads", "select", in_select, base=ClusterKV, keeps=True),
        Two(LATER, queries, "attended", queries_in_attended, needs=WEIGHTS),
    ]


def _answer(**fields: Any) -> Callable[..., Selection]:
    def act(method: Any, layer: int, q: torch.Tensor) -> Selection:
        shape = method.context.shape
        fine = torch.ones(shape.kv_heads, shape.group, method.span_ids, dtype=torch.bool)
        values = {name: value(shape) if callable(value) else value for name, value in fields.items()}
        return Selection(fine, torch.full((shape.kv_heads, 1), -1), **values)

    return act


def _figures() -> list[Lie]:
    wrong: dict[str, dict[str, Any]] = {
        "57.2 in the column `corrected`": {
            "head_columns": lambda shape: {"corrected": torch.full((shape.q_heads,), 57.2)}
        },
        "2 in the column `similarity`": {
            "kv_columns": lambda shape: {"similarity": torch.full((shape.kv_heads,), 2.0)}
        },
        "`index_bytes` of -1": {"index_bytes": -1},
        "`index_bytes` of half a byte": {"index_bytes": 0.5},
        "a cause that is none": {"cause": "wish"},
        "a span that is none": {"requested": lambda shape: torch.full((shape.kv_heads, 1), 99)},
        "a coverage of 1": {"head_columns": lambda shape: {"coverage": torch.ones(shape.q_heads)}},
        "a column of its own": {"head_columns": lambda shape: {"mine": torch.zeros(shape.q_heads)}},
    }
    lies = []
    for words, fields in wrong.items():
        act = _answer(**fields) if "requested" not in fields else _requesting(fields["requested"])
        lies.append(Lie(FIGURES, f"{words}, from `select`", "select", act, answers=True))
    return lies


def _requesting(requested: Callable[[Any], torch.Tensor]) -> Callable[..., Selection]:
    def act(method: Any, layer: int, q: torch.Tensor) -> Selection:
        shape = method.context.shape
        return Selection(torch.ones(shape.kv_heads, shape.group, method.span_ids, dtype=torch.bool), requested(shape))

    return act


def _hides() -> list[Lie]:
    places: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "an attribute": lambda keys, values: (keys.clone(), values.clone()),
        "a dict of lists": lambda keys, values: {"kv": [[keys.clone()], [values.clone()]]},
        "a closure": lambda keys, values: _closing(keys.clone(), values.clone()),
        "a partial function": lambda keys, values: functools.partial(print, keys.clone(), values.clone()),
        "numpy arrays": lambda keys, values: [keys.numpy().copy(), values.numpy().copy()],
    }

    def hide(place: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
        def act(method: Any, prompt: Any) -> None:
            method.hidden = place(prompt.keys, prompt.values)

        return act

    return [
        Lie(HIDES, f"a clone of all KV in {words}", "prefill_end", hide(place)) for words, place in places.items()
    ] + [Lie(HIDES, "a clone of all KV in a global variable", "prefill_end", _hide_globally, undo=_store.clear)]


def _closing(*tensors: torch.Tensor) -> Callable[[], object]:
    return lambda: tensors


_store: list[torch.Tensor] = []


def _hide_globally(method: Any, prompt: Any) -> None:
    _store.extend((prompt.keys.clone(), prompt.values.clone()))


class OwnError(BaseException):
    """An exception that `except Exception` does not catch."""


def _ends() -> list[Lie]:
    def raising(error: BaseException) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            raise error

        return act

    errors = (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), OwnError("mine"), RuntimeError("broken"))
    return [
        Lie(ENDS, f"`{type(error).__name__}` in `{hook}`", hook, raising(error))
        for error in errors
        for hook in ("prefill_end", "select", "decode_end")
    ]


def _loop(*arguments: Any) -> None:
    while True:
        pass


def _sleep(*arguments: Any) -> None:
    time.sleep(1000)


def _read(*arguments: Any) -> None:
    os.read(os.pipe()[0], 1)


def _hangs() -> list[Lie]:
    return [
        Lie(HANGS, f"{words} in `{hook}`", hook, act)
        for hook in ("prefill_end", "select")
        for words, act in (("a loop", _loop), ("`time.sleep(1000)`", _sleep), ("a read that never returns", _read))
    ]


LIES: tuple[Lie, ...] = (*_in_place(), *_model_weights(), *_later(), *_figures(), *_hides(), *_ends(), *_hangs())

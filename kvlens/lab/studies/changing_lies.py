"""Lies of plugin_lies.py that change a tensor of the run: what a hook was handed, or the model's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlens.lab.studies.lies import IN_PLACE, LATER, Lie, Way
from kvlens.methods.clusterkv import ClusterKV
from kvlens.methods.hooks import Needs

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


CHANGING_LIES = (*_in_place(), *_model_weights(), *_later())

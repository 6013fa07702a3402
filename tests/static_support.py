"""Cases and helpers of the static step's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from support import makes, random_llama

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Options
from kvlens.lab.gpu.static import StaticDecoder


@dataclass(frozen=True)
class Case:
    """A method, a budget at which it drops or fetches, and parameters."""

    method: str
    budget: str | None
    preset: str | None = "demo"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return "-".join([self.method, *(f"{k}={v}" for k, v in self.overrides.items())])

    def arguments(self) -> tuple[Any, Any, Budget | None]:
        """What both the engine and the static decoder take: method, parameters, budget."""
        method = methods.get(self.method)
        params = methods.make_parameters(method, self.preset if self.preset in method.presets else None, self.overrides)
        return method, params, None if self.budget is None else Budget.parse(self.budget)


_TRIED = [
    Case("full", None),
    Case("streaming_llm", "0.15"),
    Case("chess", None),
    Case("compresskv", "0.15"),
    Case("freekv", "0.3", overrides={"tau": 0.0}),
    Case("freekv", "0.3", overrides={"tau": 0.8}),
    Case("freekv", "0.3", overrides={"tau": 1.0}),
    Case("freekv", "0.4", overrides={"recall": "all", "dense_layers": 1}),
    Case("sentkv", "0.3"),
    Case("sentkv", "0.4", overrides={"group": "native"}),
    Case("sentkv", "0.5", "paper", {"usage": 0.2, "of": "current", "dense_layers": 1}),
    Case("sekv", "0.35", overrides={"form": "raw"}),
    Case("sekv", "0.35", overrides={"form": "raw", "zoom": "next"}),
    Case("sekv", "0.35"),
    Case("sekv", "0.35", overrides={"form": "factors", "zoom": "next"}),
    Case("sekv", "0.35", overrides={"form": "factors", "pre_rope": True}),
]
"""at settings whose steps are known to drop or fetch; the order is what tests refer to"""


def case_of(name: str) -> Case:
    """A method as it comes, dropping where it drops anything."""
    method = methods.get(name)
    preset = "demo" if "demo" in method.presets else None
    overrides = {} if preset else dict(method.untrained)
    return Case(name, None if method.keeps_all else "0.3", preset, overrides)


def _others() -> list[Case]:
    """Of every other make that can run static, a method."""
    tried = {case.method for case in _TRIED}
    return [case_of(name) for name in makes() if methods.get(name).static_ready and name not in tried]


CASES = [*_TRIED, *_others()]
"""every make of the registry that is static_ready; a case that is none is refused by the decoder"""
FETCHING = ("freekv", "sentkv", "sekv")


@cache
def _small(layers: int) -> Any:
    return random_llama(num_hidden_layers=layers)


def small_model(case: Case) -> Any:
    """A random model of as many layers as show what the case does, so that graphs are traced quickly and kernels are
    interpreted once: one, and those that are dense."""
    return _small(1 + int(case.overrides.get("dense_layers", 0)))


class Counting:
    """A backend of torch.compile that runs graphs as they are, counts them, and remembers where their inputs lie at
    every call."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.addresses: set[tuple[int, ...]] = set()
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.calls += 1
            self.addresses.add(tuple(x.data_ptr() for x in args if isinstance(x, torch.Tensor)))
            return graph.forward(*args)

        return run


def decoder(model: Any, prompt: Any, case: Case, steps: int, **more: Any) -> StaticDecoder:
    return StaticDecoder(model, prompt, *case.arguments(), Options(max_new=steps, ignore_eos=True), **more)

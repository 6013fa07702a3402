"""How methods are put to the bench: every registered one that is `static_ready`, found by what stands beside it.

A method needs nothing more than the flag: it runs at its preset 'paper' with what it says for models that nothing was
calibrated for, on a tenth of full KV or the least it can do with. What it attends is known without running it only
where it attends all that it keeps; elsewhere its floor is unknown, and its rows say so.

A method's part `gpu` (kvlens/methods/parts.py) says more: SETTINGS, one or several `Setting`s (the paper's sizes, what
a step moves at given rates); HEADLINES, what the paper claims; ON_DEVICE, parameters at which the engine is tried on
the device. None of it imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from kvlens import methods
from kvlens.budget import Budget
from kvlens.lab.gpu.floors import StepShape
from kvlens.methods.base import Method
from kvlens.methods.naming import stand_in, titled
from kvlens.methods.parts import part
from kvlens.shape import KVShape

OF_METHODS = "kvlens.lab.gpu.methods"
"""the package of the methods' own parts (kvlens.methods.parts)"""

LABELLED = 32 * 1024
"""tokens of context for whose parameters a setting is labelled; stand-ins are the same at every length"""
SHARE = 0.1
"""of full KV, for methods that do not say their sizes"""

Rates = Mapping[str, float]
"""decisions that depend on meaning, as shares by name; random weights cannot make them, so they are replayed"""
Shape = Callable[[KVShape, int, Rates], StepShape]
"""(model, tokens of context, rates) -> what a step does"""
Size = Callable[[Any, KVShape, int, int, Rates], Budget | None]
"""(parameters, model, tokens of context, decode steps, rates) -> what the device may hold; None: no limit"""


@dataclass(frozen=True)
class Setting:
    """One method at one setting. `name` is that of its rows, and of its rates in rates.json."""

    name: str
    title: str
    method: str
    shape: Shape | None
    """None: not known before it has run"""
    overrides: Callable[[int], dict[str, Any]]
    """tokens of context -> parameters that differ from the defaults"""
    size: Size
    rates: Rates = field(default_factory=dict)
    """the paper's, and ours where it gives none; what runs have recorded is read in rates.py. Empty: nothing is
    replayed, the method decides"""
    ours: tuple[str, ...] = ()
    """of the rates, those that no paper gives"""
    sweep: tuple[Rates, ...] = ()
    """other rates worth measuring"""
    alike: bool = False
    """replayed wishes are the same for all KV heads"""
    about: str = ""
    """one line of the docs: sizes, and what was chosen where the paper is silent"""
    plain: bool = False
    """of a method that says nothing of itself"""

    @property
    def label(self) -> str:
        """The title, with the stand-ins that the setting runs with."""
        if not self.method:
            return self.title
        return titled(self.title, stand_in(self.method, dataclasses.asdict(self.parameters(LABELLED))))

    def parameters(self, context: int) -> Any:
        results = methods.get(self.method)
        return methods.make_parameters(results, None, self.overrides(context))


@dataclass(frozen=True)
class Headline:
    """What a paper puts in its abstract: `over` / `under` of a quantity, each (name of rows, context, batch). 'memory
    saved' is 1 - under / over."""

    name: str
    paper: float
    quantity: Literal["step time", "memory saved"]
    over: tuple[str, int, int]
    under: tuple[str, int, int]


@cache
def settings() -> dict[str, Setting]:
    """Name of rows -> setting, in the registry's order. Raises ValueError where two have one name."""
    values_by_name: dict[str, Setting] = {}
    for name, method in methods.registry().items():
        if not method.static_ready:
            continue
        sentence = part(method, "gpu", OF_METHODS)
        for setting in sentence.SETTINGS if sentence is not None else (plain(name, method),):
            if setting.name in values_by_name:
                raise ValueError(f"two settings of the GPU bench are called '{setting.name}'; rename one.")
            values_by_name[setting.name] = setting
    return values_by_name


def headlines() -> list[Headline]:
    sentences = [part(method, "gpu", OF_METHODS) for method in methods.registry().values()]
    return [headline for module in sentences for headline in getattr(module, "HEADLINES", ())]


def on_device(method: type[Method]) -> tuple[tuple[dict[str, Any], float], ...]:
    """(parameters, share by which bytes may differ) at which the engine on the device is held against the engine on the
    CPU."""
    pairs: tuple[tuple[dict[str, Any], float], ...] = getattr(
        part(method, "gpu", OF_METHODS), "ON_DEVICE", (({}, 0.0),)
    )
    return pairs


def plain(name: str, method: type[Method]) -> Setting:
    """Of a method that says nothing."""

    def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
        tokens = context if method.keeps_all else math.ceil(SHARE * context)
        return StepShape(tokens, tokens)

    def overrides(context: int) -> dict[str, Any]:
        return {**method.presets.get("paper", {}), **method.untrained}

    def size(params: Any, kv: KVShape, context: int, max_new: int, rates: Rates) -> Budget | None:
        if method.keeps_all:
            return None
        share, floor = SHARE * kv.full_kv_bytes(context), method.floor_bytes(params, kv, context - 1, max_new)
        return Budget(float(max(share, floor)), "bytes", f"{SHARE:.0%} of full KV")

    attends_all = method.select is Method.select
    about = "all tokens" if method.keeps_all else f"{SHARE:.0%} of full KV, or the least it can do with"
    return Setting(name, method.title, name, shape if attends_all else None, overrides, size, about=about, plain=True)


def unlimited(params: Any, kv: KVShape, context: int, max_new: int, rates: Rates) -> None:
    """No limit: the parameters themselves say how much is kept."""


# ---------------------------------------------------------------------------------------------- transformers alone
def _keep_all(kv: KVShape, context: int, rates: Rates) -> StepShape:
    return StepShape(context, context)


def _offloaded(kv: KVShape, context: int, rates: Rates) -> StepShape:
    """Fetched layer by layer ahead of its use, into two layers' room: nothing but the bus decides."""
    return StepShape(context, 2 * context // kv.layers, wanted=1, missed=1, unit_tokens=context, waited=0.0)


def _baseline(name: str, title: str, shape: Shape, about: str) -> Setting:
    return Setting(name, title, "", shape, lambda context: {}, unlimited, about=about)


EAGER, STATIC, OFFLOADED = "hf_eager", "hf_static", "hf_offloaded"
BASELINES = {
    setting.name: setting
    for setting in (
        _baseline(EAGER, "transformers, eager", _keep_all, "`DynamicCache`, SDPA, no graph"),
        _baseline(
            STATIC, "transformers, compiled", _keep_all, "`StaticCache`, SDPA, `torch.compile` (reduce-overhead)"
        ),
        _baseline(
            OFFLOADED,
            "transformers, offloaded cache",
            _offloaded,
            "`DynamicCache(offloading=True)`, SDPA, no graph: pageable memory, every layer both ways at every step; "
            "fewer than 200 steps where these would take more than 20 s; left out where five would hold the bus for "
            "20 s, or host memory does not hold the cache",
        ),
    )
}
"""what whole steps are held against: no method of ours (plain.py runs them)"""


def everything() -> dict[str, Setting]:
    """Name of rows -> setting: all methods that can run static, then transformers alone."""
    return {**settings(), **BASELINES}


def title(name: str) -> str:
    """Of rows of that name; the name where nobody here has it."""
    known_values = everything()
    return known_values[name].label if name in known_values else name

"""Which whole steps are measured, part by part (kvlens/lab/gpu/decode.py makes each)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlens import methods
from kvlens.lab.gpu.decode import FEWER, FILES, SMALLER, cell
from kvlens.lab.gpu.decoding import HOST_LED
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.rates import swept
from kvlens.lab.gpu.recording import busiest
from kvlens.lab.gpu.settings import BASELINES, Setting, everything, settings
from kvlens.lab.results.gpu import StepRow, Way

ALIKE, ALONE = ", alike", ", transformers alone"


def decodes(context: int, batch: int) -> list[Part]:
    """Everything at one context and batch. Several sequences take long, and are two parts: what is replayed is the
    second. transformers alone, which compiles, is a part of its own. The last part, ALIKE, can wait: methods whose step
    does what another's of their family does."""
    name, known_values, waiting = f"decode {context} x {batch}", list(everything().values()), followers()
    smaller = SMALLER if batch == 1 else FEWER
    alike = [setting for setting in known_values if setting.name in waiting]
    start = [setting for setting in known_values if setting.name not in waiting and setting.method]
    groups = [(name, start)]
    if batch > 1:
        ways = [[setting for setting in start if bool(setting.rates) == replayed] for replayed in (False, True)]
        groups = [(name, ways[0]), (f"{name}, replayed", ways[1])]
    groups.append((name + ALONE, list(BASELINES.values())))
    groups.append((name + ALIKE, alike))
    return [_cells(part, context, batch, those, smaller) for part, those in groups if those]


def followers() -> set[str]:
    """Names of settings that say nothing of their step and attend all that they keep, as one of their family before
    them does."""
    texts, families = set(), set()
    for setting in settings().values():
        family = methods.get(setting.method).family
        if family in families and setting.plain and setting.shape is not None:
            texts.add(setting.name)
        families.add(family)
    return texts


def _cells(name: str, context: int, batch: int, those: Sequence[Setting], smaller: str) -> Part:
    def measure(bench: Bench) -> Iterator[StepRow]:
        for setting in those:
            yield cell(bench, setting, context, bench.rates.choose(setting), batch=batch)

    return Part(name, measure, FILES, smaller, runs_methods=True)


WAYS: tuple[Way, ...] = ("fused", "modules")


def led_by_host(context: int) -> Part:
    """Blocking recall as the papers' baselines make it."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        setting = next(setting for setting in settings().values() if setting.alike)
        for batch in bench.batches:
            yield cell(bench, setting, context, bench.rates.choose(setting), batch=batch, way=HOST_LED)

    return Part(f"decode host recalls {context}", measure, FILES, FEWER, runs_methods=True)


def compared(bench: Bench) -> tuple[Setting, Setting]:
    """Return the settings whose step is made in every way: one that keeps everything, and one that recalls."""
    whole = next(setting for setting in settings().values() if methods.get(setting.method).keeps_all)
    return whole, busiest(bench)


def ways(context: int) -> Part:
    """The same steps, made in every way."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for way in WAYS:
            for setting in compared(bench):
                yield cell(bench, setting, context, bench.rates.choose(setting), way=way)

    return Part(f"decode ways {context}", measure, FILES, SMALLER, runs_methods=True)


def sweep(context: int) -> Part:
    """Other rates than the default cells'."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for setting, rates in swept(bench.rates, tuple(settings())):
            yield cell(bench, setting, context, rates)

    return Part(f"decode sweep {context}", measure, FILES, SMALLER, runs_methods=True)


def compiled(context: int) -> Part:
    """The steps that are made in every way, compiled whole before they are captured. On an H200 that was slower than
    the fused step, so no other method is measured so."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for setting in compared(bench):
            yield cell(bench, setting, context, bench.rates.choose(setting), "compiled")

    return Part(f"compiled {context}", measure, FILES, SMALLER, runs_methods=True)

"""What the papers put in their abstracts, ratio by ratio, beside ours and beside what the bytes allow at the same
shape. Which there are, the methods say (settings.py).

The floor's ratio is the ratio of two floors at rates measured on this device (assumed ones where there are none). Where
it is below the paper's, bytes alone cannot give the paper's ratio at this shape: what is above comes from how far the
slower side is from its floor. The papers' shapes, devices and baselines are their own. Where a method's step depends on
rates, its headline stands there at the papers' and at recorded ones, ours and the floor's at the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvlens.lab.gpu.ceilings import COPY, TO_DEVICE
from kvlens.lab.gpu.floors import Model, traffic
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.rates import RateTable
from kvlens.lab.gpu.settings import BASELINES, Headline, Rates, Setting, everything, headlines
from kvlens.lab.results.gpu import HeadlineRow, RateSource, ceiling, rows

DEVICE_RATE, LINK_RATE = 3.0e12, 52e9
"""bytes per second where nothing was measured: what H100s showed for device copies, and what a Gen5 x16 bus is expected
to give"""

WAYS = ("fused", "modules")

RatesOf = Callable[[Setting], Rates]
"""the rates of a setting"""


def at_papers(setting: Setting) -> Rates:
    """The papers' rates."""
    return setting.rates


def list_measurable() -> list[Headline]:
    """Headlines both of whose sides are there to be measured, and say what their step moves."""
    named = {name for name, setting in everything().items() if setting.shape is not None}
    return [headline for headline in headlines() if {headline.over[0], headline.under[0]} <= named]


def compare(
    headline: Headline,
    model: Model,
    steps: Sequence[dict[str, Any]],
    device_rate: float,
    link_rate: float,
    rates_of: RatesOf,
    rates_from: RateSource,
) -> HeadlineRow:
    """At the rates that `rates_of` gives for a setting. steps: step rows of all scopes and rates. Both sides compute
    their layers in the same way (transformers alone has its own): the first of WAYS in which both were measured; of it
    the faster of a step as it is and one compiled stands for its method. A flat latency is reachable when the floor
    grows by less than a tenth."""
    saved = headline.quantity == "memory saved"
    column = "peak_bytes" if saved else "median"
    floors, sides = [], []
    ours: list[list[float | None]] = []
    for name, context, batch in (headline.over, headline.under):
        setting = everything()[name]
        assert setting.shape is not None
        rates = rates_of(setting)
        moved = traffic(setting.shape(model.kv, context, rates), model, batch)
        floors.append(float(moved.weights + moved.resident) if saved else moved.floor(device_rate, link_rate))
        here = [
            (row.get("way", "modules"), row[column])
            for row in steps
            if (row["method"], row["context"], row["batch"]) == (name, context, batch)
            and row["rates"] == rates
            and row[column] is not None
        ]
        ours.append(
            [min((value for way, value in here if name in BASELINES or way == each), default=None) for each in WAYS]
        )
        sides.append(f"{setting.label} {context // 1024}K x {batch}")
    floor = _ratio(headline, floors[0], floors[1])
    pairs = zip(*ours, strict=True)
    measured = next(
        (_ratio(headline, over, under) for over, under in pairs if over is not None and under is not None), None
    )
    reachable = floor < 1.1 if headline.paper == 1.0 else floor >= headline.paper
    where = " / ".join(sides)
    return HeadlineRow(headline.name, headline.quantity, headline.paper, measured, floor, where, reachable, rates_from)


def compared(
    model: Model, steps: Sequence[dict[str, Any]], device_rate: float, link_rate: float, table: RateTable
) -> list[HeadlineRow]:
    """Every headline: once where nothing in it depends on rates, else at the papers' and, where there are any, at
    recorded ones."""
    headline_rows = []
    for headline in list_measurable():
        sides = [everything()[name] for name, _, _ in (headline.over, headline.under)]
        ways: list[tuple[RateSource, RatesOf]] = [("papers", at_papers), ("recorded", table.choose)]
        if not any(side.rates for side in sides):
            ways = [("none", at_papers)]
        elif not any(side.name in table.lines for side in sides):
            ways = ways[:1]
        headline_rows += [
            compare(headline, model, steps, device_rate, link_rate, rates_of, source) for source, rates_of in ways
        ]
    return headline_rows


def _ratio(headline: Headline, over: float, under: float) -> float:
    return 1 - under / over if headline.quantity == "memory saved" else over / under


def measure(bench: Bench) -> list[HeadlineRow]:
    device, link = ceiling(bench.result, COPY) or DEVICE_RATE, ceiling(bench.result, TO_DEVICE) or LINK_RATE
    return compared(bench.model, rows(bench.result, "step"), device, link, bench.rates)


PART = Part("headlines", measure, ("headlines.py", "settings.py"), "nothing: this part is arithmetic")

"""What the papers put in their abstracts, ratio by ratio, beside ours and beside what the bytes allow at the same
shape.

The floor's ratio is the ratio of two floors at rates measured on this device (assumed ones where there are none). Where
it is below the paper's, bytes alone cannot give the paper's ratio at this shape: what is above comes from how far the
slower side is from its floor. The papers' shapes, devices and baselines are their own. Where a method's step depends on
rates, its headline stands there at the papers' and at recorded ones, ours and the floor's at the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvlens.gpu.bench.ceilings import COPY, TO_DEVICE
from kvlens.gpu.bench.floors import TITLES, Model, Rates, decode_shape, step_shape, traffic
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.rates import PAPERS, RateTable, at_papers
from kvlens.gpu.bench.result import HeadlineRow, RateSource, Scope, ceiling, rows

DEVICE_RATE, LINK_RATE = 3.0e12, 52e9
"""bytes per second where nothing was measured: what H100s showed for device copies, and what a Gen5 x16 bus is expected
to give"""

RatesOf = Callable[[str], Rates]
"""the rates of a method"""

WHOLE: tuple[Scope, ...] = ("decode", "compiled")
"""ways to make a whole step; the fastest that was measured stands for its method"""


@dataclass(frozen=True)
class Headline:
    """`over` / `under` of a quantity at two (context, batch). 'memory saved' is 1 - under / over. scope: of whole
    decode steps, or of attention path and matmuls, where the recall led by the host is."""

    name: str
    paper: float
    quantity: Literal["step time", "memory saved"]
    over: tuple[str, int, int]
    under: tuple[str, int, int]
    scope: Scope = "path"


HEADLINES = (
    Headline("FreeKV against ArkVale (up to)", 13.7, "step time", ("blocking_host", 32768, 8), ("freekv", 32768, 8)),
    Headline(
        "FreeKV against ArkVale (up to), one sequence",
        13.7,
        "step time",
        ("blocking_host", 32768, 1),
        ("freekv", 32768, 1),
    ),
    Headline(
        "FreeKV against blocking recall, whole steps",
        13.7,
        "step time",
        ("blocking", 32768, 1),
        ("freekv", 32768, 1),
        "decode",
    ),
    Headline(
        "FreeKV against blocking recall, whole steps of 8",
        13.7,
        "step time",
        ("blocking", 32768, 8),
        ("freekv", 32768, 8),
        "decode",
    ),
    Headline("CHESS against FullKV at 32K", 4.56, "step time", ("full", 32768, 1), ("chess", 32768, 1), "decode"),
    Headline("CHESS against FullKV at 32K, large batch", 4.56, "step time", ("full", 32768, 8), ("chess", 32768, 8)),
    Headline(
        "CHESS against FullKV at 32K, large batch, whole steps",
        4.56,
        "step time",
        ("full", 32768, 8),
        ("chess", 32768, 8),
        "decode",
    ),
    Headline(
        "SentKVCompress CPU-GPU against full attention (up to)",
        5.9,
        "step time",
        ("full_offload", 32768, 1),
        ("sentkv", 32768, 1),
    ),
    Headline(
        "SentKVCompress against transformers' offloaded cache, whole steps",
        5.9,
        "step time",
        ("hf_offloaded", 32768, 1),
        ("sentkv", 32768, 1),
        "decode",
    ),
    Headline(
        "SentKVCompress against transformers' offloaded cache, whole steps of 8",
        5.9,
        "step time",
        ("hf_offloaded", 32768, 8),
        ("sentkv", 32768, 8),
        "decode",
    ),
    Headline("SeKV memory at 128K", 0.533, "memory saved", ("full", 131072, 1), ("sekv", 131072, 1), "decode"),
    Headline(
        "Latency flat in context: FreeKV, 128K against 8K",
        1.0,
        "step time",
        ("freekv", 131072, 1),
        ("freekv", 8192, 1),
        "decode",
    ),
    Headline(
        "Latency flat in context: CompressKV, 128K against 8K",
        1.0,
        "step time",
        ("compresskv", 131072, 1),
        ("compresskv", 8192, 1),
        "decode",
    ),
    Headline(
        "Latency flat in context: CHESS, 32K against 8K",
        1.0,
        "step time",
        ("chess", 32768, 1),
        ("chess", 8192, 1),
        "decode",
    ),
)


def compare(
    headline: Headline,
    model: Model,
    steps: Sequence[dict[str, Any]],
    device_rate: float,
    link_rate: float,
    rates_of: RatesOf,
    rates_from: RateSource,
) -> HeadlineRow:
    """At the rates that `rates_of` gives for a method. steps: step rows of all scopes and rates. A flat latency is
    reachable when the floor grows by less than a tenth."""
    floors, ours = [], []
    for method, context, batch in (headline.over, headline.under):
        rates = rates_of(method)
        shape = (decode_shape if headline.scope == "decode" else step_shape)(method, context, rates)
        moved = traffic(shape, model, batch)
        saved = headline.quantity == "memory saved"
        floors.append(float(moved.weights + moved.resident) if saved else moved.floor(device_rate, link_rate))
        column = "peak_bytes" if saved else "median"
        scopes = WHOLE if headline.scope == "decode" else ("path",)
        here = [
            row[column]
            for row in steps
            if (row["method"], row["context"], row["batch"]) == (method, context, batch)
            and row["scope"] in scopes
            and row["rates"] == rates.of(method)
            and row[column] is not None
        ]
        ours.append(min(here, default=None))
    floor = _ratio(headline, floors[0], floors[1])
    measured = None if ours[0] is None or ours[1] is None else _ratio(headline, ours[0], ours[1])
    where = " / ".join(f"{TITLES[m]} {c // 1024}K x {b}" for m, c, b in (headline.over, headline.under))
    reachable = floor < 1.1 if headline.paper == 1.0 else floor >= headline.paper
    return HeadlineRow(headline.name, headline.quantity, headline.paper, measured, floor, where, reachable, rates_from)


def compared(
    model: Model, steps: Sequence[dict[str, Any]], device_rate: float, link_rate: float, table: RateTable
) -> list[HeadlineRow]:
    """Every headline: once where nothing in it depends on rates, else at the papers' and, where there are any, at
    recorded ones."""
    found = []
    for headline in HEADLINES:
        ways: list[tuple[RateSource, RatesOf]] = [("papers", at_papers), ("recorded", table.of)]
        if not any(PAPERS.of(method) for method, _, _ in (headline.over, headline.under)):
            ways = [("none", at_papers)]
        elif not table.recorded:
            ways = ways[:1]
        found += [
            compare(headline, model, steps, device_rate, link_rate, rates_of, source) for source, rates_of in ways
        ]
    return found


def _ratio(headline: Headline, over: float, under: float) -> float:
    return 1 - under / over if headline.quantity == "memory saved" else over / under


def measure(bench: Bench) -> list[HeadlineRow]:
    device, link = ceiling(bench.result, COPY) or DEVICE_RATE, ceiling(bench.result, TO_DEVICE) or LINK_RATE
    return compared(bench.model, rows(bench.result, "step"), device, link, bench.rates)


PART = Part("headlines", measure, ("headlines.py",), "nothing: this part is arithmetic")

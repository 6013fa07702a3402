"""SentKVCompress's claims: reuse from step to step, the rules that cut chunks, a tenth of the tokens against all, and
what the extremes weigh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlens.lab.claims import Claim, Setting, setting_of
from kvlens.methods.statements import Statement, arm
from kvlens.records import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

FIRST_SEED = 6_710_000
PAPER_SHARE = 0.07
"""of the KV, that the extremes take"""

STATEMENTS = (
    Statement(
        "SentKVCompress abstract, sec. 1",
        "About 70 % of the selected KV is reused from the step before.",
        arm("sentkv"),
        verdict="within",
        figure="reused_share",
        bounds=(0.65, 0.75),
    ),
    Statement(
        "SentKVCompress Fig. 8 (a), sec. 5.4",
        "Chunks that end at chosen punctuation near a wanted length answer more than without one of the three.",
        arm("sentkv"),
        (arm("sentkv", marks="none"), arm("sentkv", length_control=False), arm("sentkv", marks="any")),
    ),
    Statement(
        "SentKVCompress sec. 1, 3 (26.86 against 26.27)",
        "Chunks at 10 % of the tokens answer as well as all tokens.",
        arm("sentkv"),
        (arm("full"),),
        "as good",
        beside=(arm("sentkv", length=1, deviation=1, marks="none"),),
    ),
)


class Extremes:
    """A sink that keeps the bytes of the extremes and of the KV that they stand for."""

    share = 0.0

    def prefill(self, record: PrefillRecord) -> None:
        extremes, whole = next(row.values for row in record.journal if row.name == "preselection_bytes")
        self.share = float(extremes) / float(whole)

    def step(self, record: StepRecord) -> None:
        """Keep nothing: the extremes of the prompt are made once."""


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Weigh the extremes on prompts of each task, with the paper's parameters."""
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trialprompts import Prompts
    from kvlens.methods import get, make_parameters

    setting, make, method = setting_of(engine.loaded.name), Prompts(engine, FIRST_SEED), get("sentkv")
    params, shares = make_parameters(method, "paper", {}), list[float]()
    for task in setting.tasks:
        for index in range(prompts):
            _, prompt, read = make(task, setting.length, index)
            sink = Extremes()
            engine.run(prompt, method, params, None, Options(max_new=1), sink, read=read)
            shares.append(sink.share)
        report(f"sentkv: {task}, {prompts} prompts")
    return [weight(setting, shares, prompts)]


def weight(setting: Setting, shares: list[float], prompts: int) -> Claim:
    """Judge contribution 2. shares: of the KV, one per prompt."""
    mean = sum(shares) / len(shares)
    holds = round(mean, 2) <= PAPER_SHARE
    return Claim(
        "sentkv",
        "SentKVCompress sec. 1, contribution 2",
        "What selection reads (the extremes) takes 7 % of the KV.",
        f"{mean:.1%} ({min(shares):.1%} to {max(shares):.1%}); {setting.about(prompts)}, preset paper.",
        holds,
        ""
        if holds
        else f"The two extremes of a chunk take one token's KV. Chunks have {1 / mean:.1f} tokens on average here; the "
        "share is 7.1 % at 14 tokens.",
        {"mean": mean, "least": min(shares), "most": max(shares)},
    )

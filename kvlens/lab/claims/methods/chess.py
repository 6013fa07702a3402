"""CHESS's claims: dynamic against fixed reconstruction, budgets, few pages against all, how often it triggers, and
whether the pages it ranks best are those that the answer needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvlens.lab.claims import Claim, Setting, Test, setting_of
from kvlens.lab.claims.family import tested_level
from kvlens.lab.claims.methods.chess_pages import Ranked, first_selection, rank_asked, rank_by_parts, watching
from kvlens.lab.claims.plan import FEWEST
from kvlens.lab.results.power import trials_between
from kvlens.methods.statements import Statement, arm
from kvlens.models.find import DEMO
from kvlens.statistics import binomial_above, binomial_below, mean_interval, wilson
from kvlens.statistics.student import sample

if TYPE_CHECKING:
    import torch

    from kvlens.engine.engine import Engine

FIRST_SEED = 6_500_000
KEEP = (0.1, 0.2, 0.4)
"""shares of attended tokens"""
RATE_AT = "20%"
CONTEXT, FED = 896, 256
"""tokens of a passage that are read, and fed: some 31 pages, about three reconstructions at the paper's frequency"""
RATE_PASSAGES = 19
"""all that the text at hand has without common text"""
MEASURED = 2
"""claims of the paper that no arms state"""
EVERY = (5, 20)
"""pages: about every 10"""

STATEMENTS = (
    Statement(
        "CHESS App. C, Fig. 9",
        "Selecting again when the model is uncertain stays closer to full KV than every 6 pages.",
        arm("chess", "20%", trigger="dynamic"),
        (arm("chess", "20%", trigger="fixed"),),
        figure="kl",
        text=(CONTEXT, FED),
    ),
    Statement(
        "CHESS App. C, Fig. 9",
        "More pages first distract: the smallest share answers more than larger ones.",
        arm("chess", "5%"),
        (arm("chess", "10%"), arm("chess", "20%")),
        beside=(arm("chess", "40%"),),
    ),
    Statement(
        "CHESS Table 1",
        "The smallest share loses nothing against full KV.",
        arm("chess", "5%"),
        (arm("full"),),
        "as good",
    ),
)


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Check the ranks of the asked pages, and the rate of reconstruction on real text; the toy reads no prose."""
    setting = setting_of(engine.loaded.name)
    judged = [rank(setting, *measure_ranks(engine, setting, prompts, report))]
    if engine.loaded.name != DEMO:
        passages = RATE_PASSAGES if prompts >= FEWEST else prompts
        judged.insert(0, rate(*count_uncertain(engine, passages, report), passages, engine.loaded.name))
    return judged


def count_uncertain(engine: Engine, passages: int, report: Callable[[str], None]) -> tuple[int, int]:
    """Return (pages that were uncertain, pages whose tokens were all fed) on passages of real text."""
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.passages import apart, passage
    from kvlens.lab.bench.trials import chosen, settings
    from kvlens.methods.chess.method import UNCERTAIN, Chess

    loaded, uncertain, complete = engine.loaded, 0, 0
    preset, overrides, _ = settings(Chess, loaded.name, RATE_AT)
    for index in apart(FIRST_SEED, passages, CONTEXT + FED):
        context, fed = passage(FIRST_SEED + index, CONTEXT, FED, loaded.tokenizer, loaded.max_positions)
        options, notes = Options(max_new=len(fed), forced=fed), list[tuple[str, float]]()
        params = chosen(engine, context, Chess, {"preset": preset, "overrides": overrides}, None, options).params
        engine.run(context, watching(partial(_note, notes)), params, None, options)
        complete += sum(not math.isnan(value) for name, value in notes if name == "page_entropy_nats")
        uncertain += sum(value == UNCERTAIN for name, value in notes if name == "reconstructed")
        report(f"chess rate: passage {index}")
    return uncertain, complete


def _note(notes: list[tuple[str, float]], name: str, values: torch.Tensor) -> None:
    notes.append((name, float(values.ravel()[0])))


def rate(uncertain: int, complete: int, passages: int, model: str) -> Claim:
    """Judge how often dynamic reconstruction comes, by exact binomial tests of the share of pages."""
    (low, high), (often, rarely) = wilson(uncertain / complete, complete), (1 / EVERY[0], 1 / EVERY[1])
    reason = f"The interval does not lie between every {EVERY[0]} and every {EVERY[1]} pages."
    above, below = (binomial_above(uncertain, complete, bound) for bound in (rarely, often))
    under = binomial_below(uncertain, complete, rarely), binomial_below(uncertain, complete, often)
    inside, outside = max(above, under[1]), min(1.0, 2 * min(under[0], below))
    share, level = uncertain / complete, tested_level(len(STATEMENTS) + MEASURED)
    needed = trials_between(rarely, often, share, level) if rarely < share < often else None
    return Claim(
        "chess",
        "CHESS App. C",
        "Dynamic reconstruction comes about every 10 pages.",
        f"{uncertain} of {complete} pages trigger, {uncertain / complete:.1%} ({low:.1%} to {high:.1%}, 95 %); "
        f"{model}, {passages} passages of {CONTEXT} tokens, the next {FED} fed, {RATE_AT} attended, "
        "preset of the model.",
        None,
        figures={"uncertain": uncertain, "pages": complete},
        test=Test(complete, inside, outside, needed, reason, reason),
    )


def measure_ranks(
    engine: Engine, setting: Setting, prompts: int, report: Callable[[str], None]
) -> tuple[dict[float, list[Ranked]], tuple[list[Ranked], list[Ranked]]]:
    """Return how the asked pages rank at the first selection, by share attended, and by each part of the score."""
    from kvlens.lab.bench.trialprompts import Prompts

    make, ranks = Prompts(engine, FIRST_SEED), {keep: list[Ranked]() for keep in KEEP}
    parts = list[Ranked](), list[Ranked]()
    for index in range(prompts):
        for task in setting.tasks:
            prompt_text, prompt, read = make(task, setting.length, index)
            for keep in KEEP:
                selection, page = first_selection(engine, prompt, read, {"keep": keep})
                ranks[keep] += rank_asked(prompt, prompt_text.needle, selection, page)
            for part, ranked in zip(
                parts, rank_by_parts(prompt, prompt_text.needle, read, selection, page), strict=True
            ):
                part += ranked
        report(f"chess ranks: {index + 1} of {prompts} prompts of each task")
    return ranks, parts


def rank(setting: Setting, ranks: dict[float, list[Ranked]], parts: tuple[list[Ranked], list[Ranked]]) -> Claim:
    """Judge the affinity of keys: the asked pages rank better than chance, and more of them are kept than by chance."""
    mean, low, high = mean_interval([row["rank"] for row in ranks[KEEP[0]]], FEWEST)
    gains = [sample([row["kept"] - row["chance"] for row in ranks[keep]]) for keep in KEEP]
    common, newest = (mean_interval([row["rank"] for row in part]) for part in parts)
    names, n = ("kept", "flat", "chance", "spent"), len(ranks[KEEP[0]])
    means = {keep: {name: mean_interval([row[name] for row in ranks[keep]])[0] for name in names} for keep in KEEP}
    is_enough = n >= FEWEST
    worse = [sample([row["rank"] for row in ranks[KEEP[0]]]).exceeds(0.5)]
    worse += [binomial_below(math.ceil(row["kept"] * n), n, row["chance"]) for row in means.values()]
    p_holds = max(gain.exceeds(0.0) for gain in gains) if is_enough else 1.0
    p_fails = min(1.0, len(worse) * min(worse)) if is_enough else 1.0
    shown = "; ".join(
        f"{keep:.0%}: {row['kept']:.0%}, without hierarchy {row['flat']:.0%}, by chance {row['chance']:.0%}"
        for keep, row in means.items()
    )
    spent = ", ".join(f"{keep:.0%}: {row['spent']:.0%}" for keep, row in means.items())
    reason = (
        f"By the mean page alone these pages rank {common[0]:.2f} ({common[1]:.2f} to {common[2]:.2f}), by what the "
        f"newest pages add to it {newest[0]:.2f} ({newest[1]:.2f} to {newest[2]:.2f}). Selected pages that are sinks "
        f"or newest ones, attended anyway: {spent}."
    )
    return Claim(
        "chess",
        "CHESS sec. 3.2, App. B.1",
        "Pages with keys like the newest pages' are the relevant ones, and the hierarchy keeps them.",
        f"Pages with the asked facts, at the first selection: mean rank {mean:.2f} ({low:.2f} to {high:.2f}; 0 best, "
        f"0.5 by chance); kept, by share attended: {shown}; n = {n}; "
        f"{setting.model}, {', '.join(setting.tasks)}, {setting.length:,} tokens.",
        None,
        figures={
            "rank": (mean, low, high),
            "kept": {str(keep): row for keep, row in means.items()},
            "parts": (common, newest),
        },
        test=Test(n, p_holds, p_fails, None, reason, reason),
    )

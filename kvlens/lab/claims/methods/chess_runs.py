"""CHESS on answers, forced token by token: how it fares, and where the pages with the asked facts stand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvlens.engine.engine import Engine, Options
from kvlens.lab.bench.trials import chosen
from kvlens.lab.claims.methods.chess_cases import Case, Cases, Setting
from kvlens.memory.holds import Hold
from kvlens.methods.chess.method import UNCERTAIN, Chess
from kvlens.methods.chess.tree import page_vectors
from kvlens.methods.fitting import Chosen
from kvlens.methods.full import FullKV, FullParameters
from kvlens.runs.request import default_preset

Notes = list[tuple[str, torch.Tensor]]
Interval = tuple[float, float, float]
TRIGGERS = ("dynamic", "fixed")


@dataclass(frozen=True)
class Point:
    """One answer, forced token by token. The method goes its own way on it, so `right` = 1 exactly where it would have
    given it."""

    nats: float
    """surprisal of the fed answer, mean per token"""
    right: float
    """share of its tokens that were the most likely ones"""
    rebuilt: int
    """reconstructions while decoding"""
    uncertain: int
    """of them because a page was uncertain"""
    judged: int
    """pages all of whose tokens were generated"""
    pages: tuple[tuple[float, float], ...] = ()
    """of each of these, mean entropy (nats) and varentropy (nats squared), as the trigger takes them"""


Arms = dict[tuple[float, str], list[Point]]
Ranks = dict[float, list[dict[str, float]]]


@dataclass
class Measured:
    """What came of all prompts, answer by answer; (share attended, trigger) -> points."""

    at: Setting
    asked: Arms = field(default_factory=lambda: defaultdict(list))
    """answers with a key"""
    full: list[Point] = field(default_factory=list)
    """the same with full KV"""
    held: list[Point] = field(default_factory=list)
    """the same at the smallest share, with the pages of the asked facts attended: an oracle"""
    long: Arms = field(default_factory=lambda: defaultdict(list))
    """long answers, under both triggers"""
    own: Arms = field(default_factory=lambda: defaultdict(list))
    """long answers in the method's own words"""
    ranks: Ranks = field(default_factory=lambda: defaultdict(list))
    """of the pages with the asked facts at the first selection, see `needed`"""
    parts: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """their ranks by the two parts of the score"""
    presets: set[str] = field(default_factory=set)
    page: int = 0
    """tokens"""
    anyway: float = 0.0
    """share of the prompt that sinks, window and a full unfinished page are"""


def parameters(engine: Engine, case: Case, overrides: dict[str, Any]) -> Chosen:
    """Those of the model's usual preset, or `fit` where its numbers do not fit. Raises ValueError with one sentence
    where the model has no thresholds."""
    row = {"preset": default_preset(Chess.name, engine.loaded.name), "overrides": overrides}
    return chosen(engine, case.prompt, Chess, row, None, Options(forced=case.answer))


def watching(notes: Notes) -> type[Chess]:
    """CHESS whose journal is kept without a recorder."""

    class Watch(Chess):
        def note(self, name: str, values: torch.Tensor, layer: int | None = None, kv_head: int | None = None) -> None:
            notes.append((name, values))

    return Watch


def forced(
    engine: Engine, case: Case, method: Any, params: Any, notes: Notes | None = None, holds: Sequence[Hold] = ()
) -> tuple[Point, dict[str, torch.Tensor]]:
    """The case's answer fed to the method -> how it fared, and its first selection."""
    result = engine.run(
        case.prompt, method, params, options=Options(forced=case.answer), keep_logits=True, read=case.read, holds=holds
    )
    right = np.mean([int(logits.argmax()) == token for logits, token in zip(result.logits, case.answer, strict=True)])
    first: dict[str, torch.Tensor] = {}
    for name, values in notes or []:
        first.setdefault(name, values)
    return Point(-float(np.mean(result.logprobs)), float(right), **_counts(notes or [])), first


def in_own_words(engine: Engine, case: Case, params: Any) -> Point:
    """As many tokens of the method's own choice as the case's answer has; `right` is not defined and 0."""
    notes: Notes = []
    options = Options(max_new=len(case.answer))
    result = engine.run(case.prompt, watching(notes), params, options=options, read=case.read)
    return Point(-float(np.mean(result.logprobs)), 0.0, **_counts(notes))


def _counts(notes: Notes) -> dict[str, Any]:
    reasons = [float(values) for name, values in notes if name == "reconstructed"]
    entropy, varentropy = (
        [float(values) for name, values in notes if name == f"page_{figure}"]
        for figure in ("entropy_nats", "varentropy_nats2")
    )
    judged = tuple(pair for pair in zip(entropy, varentropy, strict=True) if not math.isnan(pair[0]))
    return {
        "rebuilt": sum(reason > 0 for reason in reasons),
        "uncertain": reasons.count(UNCERTAIN),
        "judged": len(judged),
        "pages": judged,
    }


def asked_pages(case: Case, page: int) -> list[int]:
    """Pages that hold tokens of the asked facts."""
    return sorted(
        {
            token // page
            for token, at in enumerate(case.prompt.offsets)
            if at and any(at[0] < stop and at[1] > start for start, stop in case.needle)
        }
    )


def held(engine: Engine, case: Case, page: int) -> list[Hold]:
    """The pages of the asked facts, attended by every KV head whatever is selected: an oracle."""
    shape = engine.loaded.shape
    everywhere = tuple((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))
    last = len(case.prompt.ids) - 1
    return [
        Hold(at + 1, at * page, min(last, (at + 1) * page), everywhere)
        for at in asked_pages(case, page)
        if at * page < last
    ]


def needed(case: Case, first: dict[str, torch.Tensor], page: int) -> list[dict[str, float]]:
    """How the pages with the asked facts stand at the first selection: mean rank among those that only a selection
    attends (0 best, 1 last, 0.5 by chance), the share of them that the hierarchy kept, the share that as many best
    pages without it would have kept, chance, and the share of the selection that went to pages attended anyway. [] when
    the facts lie in such pages."""
    score = first["page_score"].double().numpy()
    sinks, window, _ = (int(x) for x in first["safe_pages"])
    candidates = np.flatnonzero(~np.isnan(score))
    order = candidates[np.argsort(-score[candidates], kind="stable")].tolist()
    choice = [j for j in order if sinks <= j < window]
    asked = [j for j in asked_pages(case, page) if j in choice]
    if not asked:
        return []
    kept = set(np.flatnonzero(first["page_kept"].numpy()).tolist())
    best = set(order[: len(kept)])
    rank = float(np.mean([choice.index(j) for j in asked])) / max(1, len(choice) - 1)
    share, flat = (len(pages.intersection(asked)) / len(asked) for pages in (kept, best))
    spent = len(kept - set(choice)) / len(kept)
    return [{"rank": rank, "kept": share, "flat": flat, "chance": len(kept) / len(order), "spent": spent}]


def parts(case: Case, first: dict[str, torch.Tensor], page: int) -> list[list[dict[str, float]]]:
    """Ranks by the two parts of the score: with m the mean page vector, v . anchor = v . m + v . (anchor - m), and each
    part ranks by itself; as many best pages as the hierarchy kept count as kept."""
    sinks, window, stop = (int(x) for x in first["safe_pages"])
    vectors = page_vectors(case.read.keys[:, :, : stop * page], page)
    pages, anchor = vectors[sinks:window], vectors[window:stop].mean(0)
    common = pages.mean(0)
    ranked = []
    for direction in (common, anchor - common):
        score = torch.cat([torch.full((sinks,), torch.nan), pages @ direction])
        ranked.append([{**row, "kept": row["flat"]} for row in needed(case, first | {"page_score": score}, page)])
    return ranked


def measure(engine: Engine, at: Setting, prompts: int, report: Callable[[str], None]) -> Measured:
    """`prompts` prompts of each source, under all arms."""
    found, cases = Measured(at), Cases(engine, at)
    for index in range(prompts):
        for source in at.sources:
            _arms(engine, found, cases(source, index), source.keyed, source.long)
        report(f"chess: {index + 1} of {prompts} prompts of each task")
    return found


def _arms(engine: Engine, found: Measured, case: Case, keyed: bool, long: bool) -> None:
    """All arms on one case."""
    at = found.at
    if keyed:
        found.full.append(forced(engine, case, FullKV, FullParameters())[0])
    for keep in sorted({*(at.keep if keyed else ()), *(at.keep_long if long else ())}):
        for trigger in TRIGGERS if long and keep in at.keep_long else TRIGGERS[:1]:
            notes: Notes = []
            used = parameters(engine, case, {"keep": keep, "trigger": trigger})
            found.page = used.params.page
            found.anyway = (used.params.sink_pages + used.params.window_pages + 1) * found.page / at.length
            found.presets.add(str(used.preset))
            point, first = forced(engine, case, watching(notes), used.params, notes)
            if long and keep in at.keep_long:
                found.long[keep, trigger].append(point)
            if trigger != TRIGGERS[0]:
                continue
            if keep in at.own_words and long:
                found.own[keep, trigger].append(in_own_words(engine, case, used.params))
            if keyed and keep in at.keep:
                found.asked[keep, trigger].append(point)
                found.ranks[keep] += needed(case, first, found.page)
            if keyed and keep == at.keep[0]:
                holds = held(engine, case, found.page)
                found.held.append(forced(engine, case, Chess, used.params, holds=holds)[0])
                for ranks, rows in zip(found.parts, parts(case, first, found.page), strict=True):
                    ranks += [row["rank"] for row in rows]

"""How well SeKV's routing can find the spans that full attention looks at, by what the score is made of.

    python -m kvlens.lab.studies.sekv_routing [--model MODEL] [--places 64] [--held-out 12] [--steps 2000] [--out FILE]

At positions that eq. 13 is trained on (a head's four strongest spans hold half of its attention), of the attention that
all spans have: the share that the 1, 2 and 4 spans with the best scores hold. Scores: eq. 5 with W of the principal
directions of keys, and with W learned by the zoom loss (kvlens/lab/training/sekv/routing.py) in two sizes of the
routing space; q . mean key as attention would weigh it, which is eq. 5 without projection and unit norm; the bound of
the span's keys, which is Quest's. Nothing is decoded. Places are of 1,024 tokens of the training's book and code; those
that are held out are of two documents that nothing was learned on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlens import methods
from kvlens.engine import models
from kvlens.lab.bench.provenance import about
from kvlens.lab.training.sekv import corpus, losses, routing
from kvlens.lab.training.sekv.examples import Read, draw, read
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.statistics import of_mean

LENGTH = 1024
CAP = 20
"""anchors of a place, as under a tenth of full KV"""
BEST = (1, 2, 4)
SIZES = (16, 64)
PARAMS: dict[str, Any] = {"window": 32, "block": 16, "l_max": 64, "anchor_share": 0.1}
Score = Callable[[Read, routing.Looks], Tensor]
"""(document, where its heads look) -> scores [L, H, T, S]"""


def by_weight(weight: Tensor) -> Score:
    """Eq. 5."""
    return lambda results, visited: routing.scores(weight, visited.query.float(), visited.mean_keys, visited.length)


def by_mean(results: Read, looks: routing.Looks) -> Tensor:
    """What attention would give a coarse entry."""
    keys = looks.mean_keys.repeat_interleave(looks.query.shape[1] // looks.mean_keys.shape[1], 1)
    return torch.einsum("lhtd,lhsd->lhts", looks.query.float(), keys) * results.scaling + looks.length.log()


def by_bound(results: Read, looks: routing.Looks) -> Tensor:
    """The most that any key within the ranges of the span's keys could be given."""
    query, hidden = looks.query.float(), ~results.in_span[..., None]
    keys = results.keys[:, :, results.place]
    ends = (keys.masked_fill(hidden, -torch.inf).amax(3), keys.masked_fill(hidden, torch.inf).amin(3))
    group = query.shape[1] // keys.shape[1]
    high, low = (end.repeat_interleave(group, 1) for end in ends)
    upper = torch.einsum("lhtd,lhsd->lhts", query.clamp_min(0), high)
    return upper + torch.einsum("lhtd,lhsd->lhts", query.clamp_max(0), low)


def shares(score: Tensor, mass: Tensor, values: Tensor) -> list[float]:
    """Share of the mass on spans that the best BEST spans hold, mean over the positions of `values`."""
    total, ranked = mass[values], score[values]
    return [
        float((total.gather(-1, ranked.topk(min(k, total.shape[-1]), -1).indices).sum(-1) / total.sum(-1)).mean())
        for k in BEST
    ]


def measure(model: str, places: int, held_out: int, steps: int) -> dict[str, Any]:
    """Lines of score, shares and their intervals over the held-out places."""
    torch.set_num_threads(1)
    loaded = models.load(model, "cpu")
    network = loaded.model.eval().requires_grad_(False)
    params: SeKVParameters = methods.make_parameters(methods.get("sekv"), None, PARAMS)
    settings = SeKVTraining(routing_steps=steps, routing_windows=places)
    texts = [loaded.tokenizer(text)["input_ids"] for text in corpus.documents()]

    def place(total: list[list[int]], index: str) -> tuple[Read, routing.Looks]:
        ids = draw(total, LENGTH, random.Random(f"{settings.seed}/{index}"))
        mapping = read(network, ids, settings.routing_suffix, params, CAP)
        assert mapping is not None, "a place of 1,024 tokens has spans"
        return mapping, routing.looks_of(mapping, params)

    first_item, _ = place(texts[:-2], "routing/0")
    visited = [place(texts[:-2], f"routing/{index}")[1] for index in range(places)]
    scores: dict[str, Score] = {"true mass": lambda mapping, visited: visited.mass.float(), "chance": by_chance}
    group = loaded.shape.q_heads // loaded.shape.kv_heads
    for size in SIZES:
        start = sekv_router.fit_pca(first_item.keys, group, size)
        scores[f"eq. 5, principal directions, d' {size}"] = by_weight(start)
        scores[f"eq. 5, learned, d' {size}"] = by_weight(routing.learn(start, visited, settings, print))
    scores["q . mean key"] = by_mean
    scores["bound of the span's keys"] = by_bound
    mapping: dict[str, list[list[float]]] = {name: [] for name in scores}
    for index in range(held_out):
        document, looked = place(texts[-2:], f"held out/{index}")
        mass = looked.mass.float()
        own_rows = losses.mined(mass, settings.concentration, settings.strongest)
        for name, score in scores.items():
            mapping[name].append(shares(score(document, looked), mass, own_rows))
    return {
        "about": about((), model)
        | {"model": model, "length": LENGTH, "places": places, "n": held_out, "parameters": PARAMS}
        | {"training": dataclasses.asdict(settings), "documents": corpus.named(), "best": BEST},
        "lines": [{"score": name, "shares": line(total)} for name, total in mapping.items()],
    }


def by_chance(results: Read, looks: routing.Looks) -> Tensor:
    """Drawn numbers, the same every time."""
    return torch.rand(looks.mass.shape, generator=torch.Generator().manual_seed(0))


def line(values: list[list[float]]) -> list[dict[str, Any]]:
    """Mean over the places, with Student's interval."""
    columns = [list(column) for column in zip(*values, strict=True)]
    return [{"mean": round(sum(x) / len(x), 4), "interval": of_mean(x)} for x in columns]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.places, options.held_out, options.steps)
    for each in result["lines"]:
        sentence = "  ".join(f"{x['mean']:.3f}" for x in each["shares"])
        print(f"{each['score']:60s} {sentence}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Which part of SeKV loses an answer on a real model: arms with oracles in place of one part (sekv_oracles.py).

    python -m kvlens.lab.studies.sekv_real [--model smollm2] [--prompts 8] [--length 2048] [--budget 20%] [--out FILE]

Prompts: the topics of Python's own documentation (pydoc_data), whole sentences in their order, with one sentence that
tells a number, in the chat form with the beginning of the answer. The question is known: it stands in the prompt.

It is no study of kvlens.studies: an oracle takes the place of a part inside a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from kvlens.budget import Budget
from kvlens.engine import models
from kvlens.engine.engine import Engine
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.provenance import weights
from kvlens.lab.bench.trialprompts import DEPTHS
from kvlens.lab.studies.sekv_oracles import Oracle, OracleSession
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.params import PRESETS, SeKVParameters
from kvlens.methods.sekv.spans import COMPRESSED, segment
from kvlens.models.device import machine
from kvlens.spans import Surprisal
from kvlens.statistics import wilson
from kvlens.tasks.encoding import encoding_of
from kvlens.tasks.words import ADJECTIVES, NOUNS
from kvlens.text.prompts import Prompt, PromptText, tokenize

NEW = 16
"""tokens that the device is divided for"""
SIZES = {name: PRESETS["bound"][name] for name in ("window", "block", "l_max", "anchor_share")}
PUBLISHED = {**SIZES, "dim": 16}
"""the sizes of the preset 'bound' with the published gate"""
WITH_COARSE = {**PRESETS["no-coarse"], "coarse": True}
ARMS: dict[str, tuple[Oracle, dict[str, Any]]] = {
    "full": (Oracle(everything=True), PUBLISHED),
    "published": (Oracle(), PUBLISHED),
    "published, to the budget": (Oracle(rate=1), PUBLISHED),
    "needle expanded in every layer": (Oracle(needle=range(1000)), PUBLISHED),
    "needle expanded in layers 6 to 11": (Oracle(needle=range(6, 12)), PUBLISHED),
    "needle expanded from layer 12 on": (Oracle(needle=range(12, 1000)), PUBLISHED),
    "true mass as score, to the budget": (Oracle("mass", 1), PUBLISHED),
    "exact below layer 8": (Oracle(exact=range(8)), PUBLISHED),
    "coarse weights of second order": (Oracle(coarse="second"), PUBLISHED),
    "true coarse masses": (Oracle(coarse="true"), PUBLISHED),
    "true coarse masses and values": (Oracle(coarse="true+values"), PUBLISHED),
    "no coarse entries": (Oracle(coarse="none"), PUBLISHED),
    "mean key, to the budget": (Oracle("mean", 1), {**PRESETS["bound"], "router": "mean", "piece": 0}),
    "bound of pieces, to the budget": (Oracle("bound", 1), PRESETS["bound"]),
    "no-coarse": (Oracle("mean", 1, coarse="none"), PRESETS["no-coarse"]),
    "no-coarse with coarse entries": (Oracle("mean", 1), WITH_COARSE),
    "no-coarse, room as with coarse entries": (Oracle("mean", 1, coarse="none", other_room=True), PRESETS["no-coarse"]),
    "no-coarse with coarse entries, room as without": (Oracle("mean", 1, other_room=True), WITH_COARSE),
    "no-coarse by eq. 5": (Oracle(rate=1, coarse="none"), {**PRESETS["no-coarse"], "router": "pca", "dim": 16}),
}


def sentences() -> list[str]:
    """Of all topics in the order of their names, without tables and headings."""
    out = []
    for name in sorted(topics):
        lines = [x for x in topics[name].splitlines() if not re.match(r"^(\s{3,}|[*=~^\-]{3,}|\.\.)", x)]
        pieces = re.split(r"(?<=[.!?])\s+", " ".join(" ".join(lines).split()))
        out += [sentence for sentence in pieces if 30 < len(sentence) < 400]
    return out


def ask(tokenizer: Any, length: int, index: int) -> tuple[Prompt, str]:
    """A prompt of at most `length` tokens, and the number it asks for."""
    rng, encoding, prose = random.Random(f"sekv/test/{index}"), encoding_of(tokenizer), sentences()
    name, number = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", str(rng.randrange(1000000, 9999999))
    position = rng.randrange(len(prose))
    fact, opening = f"The secret number of the {name} is {number}.", f"The secret number of the {name} is"
    head, tail = "Read this text.\n", f"\nQuestion: What is the secret number of the {name}?"
    room = length - encoding.special - sum(len(encoding.encode(x)) for x in (head + fact + tail, opening)) - 2
    hay, ends = [], [0]
    for _ in range(len(prose)):
        position += 1
        tokens = len(encoding.encode(" " + prose[position % len(prose)]))
        if tokens <= room - ends[-1]:
            hay.append(prose[position % len(prose)])
            ends.append(ends[-1] + tokens)
        elif room - ends[-1] < 8:
            break
    goal = DEPTHS[index % len(DEPTHS)] * ends[-1]
    place = min(range(len(ends)), key=lambda i: abs(ends[i] - goal))
    previous = head + "".join(f"{sentence} " for sentence in hay[:place])
    text = previous + " ".join([fact, *hay[place:]]) + tail
    source = PromptText(text, f" {number}", ((len(previous), len(previous) + len(fact)),), None, index, opening)
    return tokenize(source, tokenizer, 1 << 20, NEW), number


def session(engine: Engine, prompt: Prompt, read: ReadPrompt, arm: Oracle, set_: dict[str, Any], budget: str) -> Any:
    """Spans, and room for expanded ones, as the method itself would have them within the budget."""
    params, shape, n = SeKVParameters(**set_), engine.loaded.shape, len(prompt.ids) - 1
    limit = Budget.parse(budget).bytes(shape, len(prompt.ids) + NEW)
    nats = read.surprisal.whole()[:n].tolist()
    cap = sekv_layout.anchor_cap(params, shape, limit)
    spans = segment(params, nats[: n - params.window], 0, Surprisal.measure(nats), cap)
    plan = sekv_layout.plan(params, spans, n, NEW)
    sized = dataclasses.replace(params, coarse=params.coarse != arm.other_room)
    room = plan.recall_within(sized, shape, limit, n)
    if room is None:
        raise SystemExit(f"{budget} of {n:,} tokens is not feasible for {set_}.")
    (start, end), choice = prompt.source.needle[0], [span for span in spans if span.kind in COMPRESSED]
    tokens = [
        i for i, index in enumerate(prompt.offsets[:n]) if index is not None and index[0] < end and index[1] > start
    ]
    needle = torch.tensor([any(s.tok_start <= i < s.tok_end for i in tokens) for s in choice])
    return OracleSession(shape, read, choice, room, needle, arm, (params.dim, params.piece))


@torch.inference_mode()
def logits_of(engine: Engine, prompt: Prompt, answer: list[int], value: Any) -> torch.Tensor:
    """Log-probabilities [m, V] before each of the answer's tokens."""
    fed = torch.tensor([[prompt.ids[-1], *answer[:-1]]])
    cache = SessionCache(value, engine.loaded.shape.layers)
    out = engine.loaded.model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0]
    logprobs: torch.Tensor = out.float().log_softmax(-1)
    return logprobs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--out", type=Path, default=Path("build/sekv_real.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(models.load(arguments.model, "cpu"))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for index in range(arguments.prompts):
        prompt, number = ask(engine.loaded.tokenizer, arguments.length, index)
        read = engine.read(prompt)
        answer = engine.loaded.tokenizer(f" {number}", add_special_tokens=False)["input_ids"]
        target, full = torch.tensor(answer), None
        for name, (arm, set_) in ARMS.items():
            got = logits_of(engine, prompt, answer, session(engine, prompt, read, arm, set_, arguments.budget))
            full = got if full is None else full
            row = {
                "exact": float((got.argmax(-1) == target).all()),
                "logprob": float(got.gather(1, target[:, None]).mean()),
                "kl": float((full.exp() * (full - got)).sum(-1).mean()),
            }
            rows[name].append(row)
    about = {**machine(), "model": arguments.model, "weights": weights(arguments.model), "threads": 1}
    lines = [line(name, total) for name, total in rows.items()]
    for entry in lines:
        print(f"{entry['arm']:36s} {entry['exact']:.2f} ({entry['low']:.2f}-{entry['high']:.2f}) n={entry['n']}")
    request = {"length": arguments.length, "budget": arguments.budget, "question": "known"}
    settings = {name: {"oracle": repr(arm), "set": set_} for name, (arm, set_) in ARMS.items()}
    arguments.out.write_text(json.dumps({"about": about, **request, "arms": settings, "lines": lines}, indent=1) + "\n")


def line(name: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """An arm: n, exact match with its Wilson interval, means of the rest."""
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    low, high = wilson(mean["exact"], len(rows))
    return {"arm": name, "n": len(rows), **mean, "low": low, "high": high}


if __name__ == "__main__":
    main()

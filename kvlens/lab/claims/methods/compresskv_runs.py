"""What CompressKV's claims are measured on: tasks, lengths and counts by model, and the runs themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.models.find import DEMO

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.methods.compresskv.heads import HeadFigures
    from kvlens.methods.compresskv.method import CompressKV
    from kvlens.tasks import Asked
    from kvlens.text.prompts import Prompt

FIRST_SEED = 9_700_000
ARMS: dict[str, dict[str, Any]] = {
    "all heads": {"heads": "all", "layers": "equal"},
    "TRH": {"heads": "trh", "layers": "equal"},
    "SRH": {"layers": "equal"},
    "SRH + layers": {},
    "2 SRH": {"layers": "equal", "top_heads": 2},
    "6 SRH": {"layers": "equal", "top_heads": 6},
}
"""'all heads' is SnapKV's rule with one token set per layer, and as many SRH as there are heads"""
HELD = "SRH, answer held"
"""an oracle: as SRH, and the tokens of the answer beside them, for every KV head"""
Arm = tuple[str, int, str]
"""which heads are off, how many, when"""
NOTHING, CONTROL = ("none", 0, ""), "lowest SRH"
DECODE, BOTH = "decode", "prefill and decode"


@dataclass(frozen=True)
class Setting:
    """What differs by model."""

    named: str
    """the model, as a sentence says it"""
    length: int
    """prompt tokens"""
    tasks: tuple[str, ...]
    """of the selection's arms; ours: such as full KV can do"""
    tokens: tuple[int, ...]
    """prompt tokens kept per layer; the paper: 256 of up to 32K, which is 0.8 %"""
    masked_task: str
    masked: tuple[int, ...]
    """heads switched off, best first (the paper: 10, 20 and 30 of 1,024, which are 1, 2 and 3 %)"""
    masked_reading: tuple[int, ...]
    """of these, those that are off while the prompt is read, too: every one of them costs a prefill"""


TOY = Setting("the demo model", 2048, ("needle", "multikey", "list"), (32, 64), "multikey", (1, 2, 4, 6), (1, 2, 4, 6))
PROSE = ("niah_single", "niah_noise")
"""with as many tokens left as here, a needle among its kind is answered by no arm: it would tell nothing"""
SHARES = (0.01, 0.02, 0.03)
"""of the query heads that are switched off on any other model"""


def setting(model: str, q_heads: int) -> Setting:
    """What a model is measured on; q_heads: of all its layers together."""
    if model == DEMO:
        return TOY
    masked = tuple(sorted({max(1, round(share * q_heads)) for share in SHARES}))
    return Setting(model, 1024, PROSE, (64, 96), "niah_single", masked, masked[:1])


def ranked(scores: list[list[float]]) -> list[tuple[int, int]]:
    """(layer, head), best first; ties by layer, then head."""
    pairs = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(pairs, key=lambda at: (-scores[at[0]][at[1]], at))


def masking(
    engine: Engine, at: Setting, order: dict[str, list[tuple[int, int]]], prompts: int, report: Callable[[str], None]
) -> dict[Arm, list[float]]:
    """Arm -> score per prompt, under full KV. order: kind of heads -> heads, first those that are switched off first;
    of CONTROL only the largest count is, while reading too."""
    from kvlens import tasks
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trials import NEW_TOKENS, Prompts
    from kvlens.lab.calibrate.projection import heads_off
    from kvlens.methods.full import FullKV

    task, make = tasks.get(at.masked_task), Prompts(engine, FIRST_SEED)
    options = Options(max_new=NEW_TOKENS[task.name])
    right: dict[Arm, list[float]] = {}

    def ask(arm: Arm, asked: Asked, prompt: Prompt, read: Any) -> None:
        out = engine.run(prompt, FullKV, FullKV.Parameters(), None, options, read=read)
        right.setdefault(arm, []).append(task.grade(asked, out.text))

    for index in range(prompts):
        asked, prompt, read = make(task.name, at.length, index)
        ask(NOTHING, asked, prompt, read)
        for kind, heads in order.items():
            for count in at.masked if kind != CONTROL else at.masked[-1:]:
                with heads_off(engine.loaded, heads[:count]):
                    ask((kind, count, DECODE), asked, prompt, read)
                    if count in at.masked_reading or kind == CONTROL:
                        ask((kind, count, BOTH), asked, prompt, None)
        report(f"compresskv masking: prompt {index + 1} of {prompts}")
    return right


@dataclass(frozen=True)
class Selected:
    """Of each arm, per (task, tokens kept, prompt)."""

    score: dict[str, np.ndarray]
    """the task's own, 0..1"""
    kept: dict[str, np.ndarray]
    """share of the answer's tokens that a layer kept, mean over the layers"""
    full: np.ndarray
    """score with full KV, per (task, prompt)"""
    preset: str
    """whose numbers the arms ran with, but for what they are named after"""


def selection(engine: Engine, at: Setting, prompts: int, report: Callable[[str], None]) -> Selected:
    """All arms on the same prompts."""
    from kvlens import tasks
    from kvlens.engine.engine import Options
    from kvlens.lab.bench.trials import NEW_TOKENS, Prompts
    from kvlens.memory.holds import Hold
    from kvlens.methods.full import FullKV

    make, names = Prompts(engine, FIRST_SEED), (*ARMS, HELD)
    shape = (len(at.tasks), len(at.tokens), prompts)
    score, kept = ({name: np.zeros(shape) for name in names} for _ in range(2))
    full, presets = np.zeros((len(at.tasks), prompts)), set()
    sizes = engine.loaded.shape
    everywhere = tuple((layer, head) for layer in range(sizes.layers) for head in range(sizes.kv_heads))
    for index in range(prompts):
        for t, task in enumerate(at.tasks):
            asked, prompt, read = make(task, at.length, index)
            options, answer = Options(max_new=NEW_TOKENS[task]), answer_tokens(asked, prompt)
            out = engine.run(prompt, FullKV, FullKV.Parameters(), None, options, read=read)
            full[t, index] = tasks.get(task).grade(asked, out.text)
            for b, tokens in enumerate(at.tokens):
                for name in names:
                    found = _chosen(engine, prompt, options, {**ARMS.get(name, ARMS["SRH"]), "tokens": tokens})
                    presets.add(found.preset)
                    holds = [Hold(token, token, token + 1, everywhere) for token in answer if name == HELD]
                    masks: list[Any] = []
                    out = engine.run(prompt, _watching(masks), found.params, None, options, read=read, holds=holds)
                    score[name][t, b, index] = tasks.get(task).grade(asked, out.text)
                    kept[name][t, b, index] = float(np.mean([mask[answer] for mask in masks]))
        report(f"compresskv selection: prompt {index + 1} of {prompts}")
    return Selected(score, kept, full, " and ".join(sorted(map(str, presets))))


def _chosen(engine: Engine, prompt: Prompt, options: Any, overrides: dict[str, Any]) -> Any:
    """The parameters of an arm: the model's usual preset, `fit` where its numbers do not fit."""
    from kvlens.lab.bench.trials import chosen
    from kvlens.methods.compresskv.method import CompressKV
    from kvlens.runs.request import default_preset

    row = {"preset": default_preset("compresskv", engine.loaded.name), "overrides": overrides}
    return chosen(engine, prompt, CompressKV, row, None, options)


def _watching(masks: list[np.ndarray]) -> type[CompressKV]:
    """CompressKV that says which prompt tokens each layer kept: one mask per layer."""
    from kvlens.methods.compresskv.method import CompressKV

    class Watch(CompressKV):
        def placed(self, layer: int, score: Any, mask: Any) -> None:
            super().placed(layer, score, mask)
            masks.append(mask[0].numpy())

    return Watch


def answer_tokens(asked: Asked, prompt: Prompt) -> list[int]:
    """Prompt tokens of the answer's parts where they stand in the asked facts; of a fact that holds none of them as it
    is written, all tokens."""
    ranges = []
    for start, stop in asked.needle:
        places = [(asked.text.find(part.strip(), start, stop), len(part.strip())) for part in asked.answers]
        ranges += [(place, place + size) for place, size in places if place >= 0] or [(start, stop)]
    return [
        token
        for token, place in enumerate(prompt.offsets)
        if place and any(place[0] < stop and place[1] > start for start, stop in ranges)
    ]


def head_figures(engine: Engine) -> HeadFigures:
    """The model's calibration. Raises ValueError with what to do where there is none."""
    from kvlens.methods.calibration import given
    from kvlens.methods.compresskv.method import CompressKV

    found: HeadFigures = given(CompressKV, CompressKV.Parameters(), engine.loaded.shape, engine.loaded.name)[
        "head scores"
    ]
    return found

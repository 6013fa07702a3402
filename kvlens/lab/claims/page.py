"""The papers' claims in words: docs/evidence/claims.md, made of a result file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvlens import methods
from kvlens.lab.results.power import MOST
from kvlens.methods.naming import preset_name
from kvlens.methods.statements import FIGURES
from kvlens.runs.request import default_preset
from kvlens.text.units import counted

VERDICTS = {True: "holds", False: "does not hold", None: "is not decided"}
INTRODUCTION = """# What the papers claim, checked on {model}

Made by `kvlens bench claims --doc docs/evidence/claims.md`. With `--judge` it judges stored figures and runs no model.
Figures with their provenance are in `kvlens/lab/results/claims-*.json` and on the Benchmarks page. What the five
systems' claims rest on, and the toy beside them: [five-systems.md](five-systems.md). Errors of the tests and intervals:
[paired.md](paired.md).

A claim is a sentence of a paper, in our words, and what would show it. Most are comparisons: a method as a run of it
would be at that budget (*presets*) against others on the same prompts.

| verdict asked | the claim holds if |
| --- | --- |
| *better* | the gain over each other arm is above 0 |
| *as good* | the gain over each other arm is above minus a margin of ours |
| *alike* | the gain over each other arm is within the margin, to both sides |
| *within* | the mean is in the paper's range |

Margins are {exact} of exact match, {coverage} of full attention's mass and {kl} nats. A gain in KL is a smaller KL;
passages of text share none.

**Tests.** An exact unconditional test on Tango's statistic compares exact match; Student's t compares other figures.
The interval beside a gain is Tango's or Student's, 95 %, of that comparison alone. The verdict is over all claims of
the paper. Holm's correction keeps the probability of any false *holds* in a paper at 2.5 % or less, and that of any
false *does not hold* likewise. A claim that a count decides, without a sample of prompts, is not corrected.
Student's t presumes that differences are nearly normal; 10 passages cannot show whether they are.

**Needs n.** *Is not decided: n = 20, needs n = 88* states the pairs of trials that decide the claim with 80 % power.
The level is that of the first claim of the paper; the share of discordant pairs, or the spread, is the measured one.
*Better* is planned for a gain as large as the margin, *as good* and *alike* for equal arms.

A budget is a share of full KV held on the device; for a method that keeps all KV it is a share of tokens attended per
query head, so that it may read more than others at the same number: *holds* and *reads* say what each arm came to.
Where a paper's text was not at hand, a source names the part of it and no number.

A claim that does not hold here was left as it was found. A small model and prompts of about 1,000 tokens can refute
that a mechanism works everywhere, not a paper's result on its own models.

| method | claims | hold | do not hold | are not decided |
| --- | --- | --- | --- | --- |
"""


def heading(name: str, model: str) -> str:
    """Return what a method is called under the preset that `model` usually runs it with: a stand-in is named."""
    return preset_name(name, default_preset(name, model))


def document(result: dict[str, Any], model: str) -> str:
    """The page: how many claims of each method hold, then each with all that was measured."""
    parts = {name: result["methods"][name] for name in methods.registry() if name in result["methods"]}
    text = INTRODUCTION.format(model=model, **{name: figure.margin for name, figure in FIGURES.items()})
    total: Counter[bool | None] = Counter()
    for name, part in parts.items():
        here = Counter(claim["holds"] for claim in part["claims"])
        total += here
        title = heading(name, model)
        text += f"| [{title}](#{_anchor(title)}) | {len(part['claims'])} | {_counts(here)} |\n"
    text += f"| all | {total.total()} | {_counts(total)} |\n"
    for name, part in parts.items():
        text += f"\n## {heading(name, model)}\n\n{methods.get(name).paper}. {_where(part['about'])}\n\n"
        for claim in part["claims"]:
            texts = (f"{claim['source']}: {claim['says']}", claim["measured"], claim["reason"])
            says, measured, reason = (part.rstrip(".") + "." if part else "" for part in texts)
            text += f"- **{says}** It {verdict_words(claim)}. {_begun(measured)} {_begun(reason)}".rstrip() + "\n"
    return text


def verdict_words(claim: Mapping[str, Any]) -> str:
    """Return 'holds', or 'is not decided: n = 20, needs n = 88'. claim: plain JSON (kvlens.lab.claims.written)."""
    test, verdict = claim.get("test"), VERDICTS[claim["holds"]]
    if claim["holds"] is not None or not test:
        return verdict
    needed = test["needs"]
    if needed is None or needed <= test["n"]:
        return f"{verdict}: n = {test['n']}"
    return f"{verdict}: n = {test['n']}, needs n = {needed:,}" + (" or more" if needed >= MOST else "")


def _counts(verdicts: Counter[bool | None]) -> str:
    return " | ".join(str(verdicts[verdict]) for verdict in VERDICTS)


def _where(about: dict[str, Any]) -> str:
    machine = about["machine"]
    cores = counted(machine["cores"], "core")
    prompts = counted(about["prompts"], "prompt")
    return f"Measured {about['date']}: {machine['processor']}, {cores}, torch {about['torch']}; {prompts} a point."


def _begun(sentence: str) -> str:
    """With a capital."""
    return sentence[:1].upper() + sentence[1:]


def _anchor(title: str) -> str:
    """What a heading is linked by."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")

"""The papers' claims in words: docs/claims.md, made of a result file."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvlens import methods
from kvlens.methods.statements import FIGURES
from kvlens.text.units import counted

VERDICTS = {True: "holds", False: "does not hold", None: "cannot be decided"}
INTRODUCTION = """# What the papers claim, checked on {model}

Made by `kvlens bench claims --doc docs/claims.md`; figures with their provenance are in
`kvlens/lab/results/claims-*.json` and on the Benchmarks page. What the five systems' claims rest on, and the toy beside
them: [fidelity.md](fidelity.md).

A claim is a sentence of a paper, in our words, and what would show it. Most are comparisons: a method as a run of it
would be at that budget (*presets*) against others on the same prompts. *Better*: the 95 % interval of the gain, by
prompts, lies above 0 over each other arm (exact match: Agresti and Min's interval of paired shares; else Student's).
*As good*: it lies above minus a margin of ours, {exact} of exact match, {coverage} of full attention's mass or {kl}
nats; *alike*: within it to both sides. *Within*: the 95 % interval of the mean lies in the paper's range. A claim does
not hold where an interval lies wholly outside, at 95 % over all its comparisons together; all else cannot be decided.
Nothing is corrected over claims: of forty that are true one would be expected to fail. A gain in KL is a smaller KL;
passages of text share none.

A budget is a share of full KV held on the device; for a method that keeps all KV it is a share of tokens attended per
query head, so that it may read more than others at the same number: *holds* and *reads* say what each arm came to.
Where a paper's text was not at hand, a source names the part of it and no number.

A claim that does not hold here was left as it was found. A small model and prompts of about 1,000 tokens can refute
that a mechanism works everywhere, not a paper's result on its own models.

| method | claims | hold | do not hold | cannot be decided |
| --- | --- | --- | --- | --- |
"""


def document(result: dict[str, Any], model: str) -> str:
    """The page: how many claims of each method hold, then each with all that was measured."""
    parts = {name: result["methods"][name] for name in methods.registry() if name in result["methods"]}
    text = INTRODUCTION.format(model=model, **{name: figure.margin for name, figure in FIGURES.items()})
    total: Counter[bool | None] = Counter()
    for name, part in parts.items():
        here = Counter(claim["holds"] for claim in part["claims"])
        total += here
        title = methods.get(name).title
        text += f"| [{title}](#{_anchor(title)}) | {len(part['claims'])} | {_counts(here)} |\n"
    text += f"| all | {total.total()} | {_counts(total)} |\n"
    for name, part in parts.items():
        text += f"\n## {methods.get(name).title}\n\n{methods.get(name).paper}. {_where(part['about'])}\n\n"
        for claim in part["claims"]:
            texts = (f"{claim['source']}: {claim['says']}", claim["measured"], claim["reason"])
            says, measured, reason = (part.rstrip(".") + "." if part else "" for part in texts)
            text += f"- **{says}** It {VERDICTS[claim['holds']]}. {_begun(measured)} {_begun(reason)}".rstrip() + "\n"
    return text


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

"""Published chat templates: the text that kvlens feeds against the text that transformers renders, byte for byte.

    python -m kvlens.lab.studies.template_texts FOLDER... --write docs/evidence/templates.md

A folder holds checked-out repositories, a folder each. The study takes every folder with a tokenizer_config.json that
has a chat template, and every other .jinja file. Templates of others stay where they are: the page has names, hashes
and results alone."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from kvlens.text.chat import BadTemplate, Template, choose, refuse_change, template_in

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""special tokens of a template that comes without a tokenizer's configuration"""
USER = "Which number is written on the door?\n\nIt has 5 digits: {x} <b> \u6570\u5b57 \U0001f511.  "
"""a user's text with line ends, braces, other scripts and spaces at its end"""
SYSTEM, EARLIER = "Answer with the number alone.", (("user", "Is there a door?"), ("assistant", "Yes."))
CONVERSATIONS: dict[str, tuple[str | None, tuple[tuple[str, str], ...]]] = {
    "one turn": (None, ()),
    "system message": (SYSTEM, ()),
    "three turns": (None, EARLIER),
}
"""name -> (system message, earlier turns); the user's text ends each"""
EQUAL, BOTH, REFUSED, DIFFERENT = "equal", "refused by both", "refused by kvlens", "differs"
PAGE = """# Published chat templates

Made by `python -m kvlens.lab.studies.template_texts FOLDER... --write docs/evidence/templates.md` on {day}.
kvlens puts a user's text into a template; transformers {version} renders the same conversation by
`apply_chat_template`. *Equal* means equal byte for byte. *Refused by both* means that the template itself raises an
error, for example on a system message.

The templates are {count} different ones, from these public repositories: {sources}. They are not part of kvlens.

| conversation | {heads} |
| --- | {lines} |
{totals}

## Refused by kvlens alone, or different

{reasons}

## Templates

| template | sha256 | {names} |
| --- | --- | {columns} |
{rows}
"""


@dataclass(frozen=True)
class Result:
    """A conversation under a template."""

    verdict: str
    reason: str = ""


def templates(folders: Iterable[Path]) -> Iterator[tuple[str, Template]]:
    """Yield the name and the template of every tokenizer and .jinja file below the folders, each text once."""
    hashes = set[str]()
    for folder in folders:
        configurations = sorted(folder.rglob("tokenizer_config.json"))
        homes = {path.parent for path in configurations}
        files = [path for path in sorted(folder.rglob("*.jinja")) if path.parent not in homes]
        candidates = [(path.parent, template_in(path.parent)) for path in configurations]
        candidates += [(path, Template(path.read_text(encoding="utf-8"), SPECIALS)) for path in files]
        for path, template in candidates:
            if template is not None and template.sha256 not in hashes:
                hashes.add(template.sha256)
                yield str(path.relative_to(folder)), template


def reference(template: Template, messages: list[dict[str, str]]) -> str:
    """Return the text that a transformers tokenizer with this template renders."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")), **dict(template.specials)
    )
    text = tokenizer.apply_chat_template(
        messages, chat_template=template.text, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def compare(template: Template, system: str | None, turns: tuple[tuple[str, str], ...], text: str = USER) -> Result:
    """Return whether kvlens feeds what transformers renders for one conversation."""
    pairs = [*([("system", system)] if system else []), *turns, ("user", text)]
    try:
        expected: str | None = reference(template, [{"role": role, "content": content} for role, content in pairs])
    except Exception as error:  # a template is a stranger's program: it may raise anything
        expected, problem = None, f"{type(error).__name__}: {error}"
    try:
        form = choose(template, "on", system, turns)
        assert form is not None
        refuse_change(template, form, text, turns)
    except BadTemplate as error:
        return Result(BOTH, problem) if expected is None else Result(REFUSED, str(error))
    fed = form.around(text)[0]
    if expected is None:
        return Result(DIFFERENT, f"transformers refuses it ({problem})")
    if fed == expected:
        return Result(EQUAL)
    place = next(
        (i for i, (a, b) in enumerate(zip(fed, expected, strict=False)) if a != b), min(len(fed), len(expected))
    )
    return Result(DIFFERENT, f"from character {place:,}: {fed[place:][:20]!r} against {expected[place:][:20]!r}")


def measure(folders: Iterable[Path]) -> dict[tuple[str, str], dict[str, Result]]:
    """Return the results of every template by (name, hash) and conversation."""
    return {
        (name, template.sha256): {case: compare(template, *CONVERSATIONS[case]) for case in CONVERSATIONS}
        for name, template in templates(folders)
    }


def page(results: dict[tuple[str, str], dict[str, Result]], day: str) -> str:
    """Return the page of the evidence. day: on which the templates were compared, as ISO 8601."""
    import transformers

    verdicts = (EQUAL, BOTH, REFUSED, DIFFERENT)
    totals = {case: Counter(row[case].verdict for row in results.values()) for case in CONVERSATIONS}
    reasons = [
        f"- {name}, {case}: {result.verdict}. {_one_line(result.reason)}"
        for (name, _), row in results.items()
        for case, result in row.items()
        if result.verdict in (REFUSED, DIFFERENT)
    ]
    rows = [
        f"| {name} | {digest[:12]} | {' | '.join(row[case].verdict for case in CONVERSATIONS)} |"
        for (name, digest), row in results.items()
    ]
    sources = dict.fromkeys(name.split("/")[0].replace("+", "/") for name, _ in results)
    return PAGE.format(
        day=day,
        version=transformers.__version__,
        count=len(results),
        sources=", ".join(sources),
        heads=" | ".join((*verdicts, "n")),
        lines=" | ".join("---:" for _ in (*verdicts, "n")),
        totals="\n".join(
            f"| {case} | {' | '.join(str(count[verdict]) for verdict in verdicts)} | {count.total()} |"
            for case, count in totals.items()
        ),
        reasons="\n".join(reasons) or "None.",
        names=" | ".join(CONVERSATIONS),
        columns=" | ".join("---" for _ in CONVERSATIONS),
        rows="\n".join(rows),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:240]


def main(arguments: list[str] | None = None) -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="file to write")
    options: Any = parser.parse_args(arguments)
    text = page(measure(options.folders), date.today().isoformat())
    if options.write is None:
        print(text)
    else:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a refused job says would do, as a button: nobody has to type an option."""

from __future__ import annotations

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.jobs import Job
from kvlens.app.ui.common.pagewords import page_words
from kvlens.budget import NO_LIMIT, in_words


def advice(job: Job) -> dict[str, str]:
    """Option of `kvlens run` -> the value that would do, a budget as a percentage; {} where none is known."""
    if job.argv[3:4] != ["run"]:
        return {}
    lines = dict(job.would_do)
    if "budget" in lines:
        lines["budget"] = f"{float(lines['budget']):.1%}"
    return {f"--{name}": value for name, value in lines.items()}


def label(options: dict[str, str]) -> str:
    """The button: 'Run again with the budget 23.5%'."""
    sentence = [
        NO_LIMIT if in_words(value) == NO_LIMIT else f"the {name[2:]} {value}" for name, value in options.items()
    ]
    return f"Run again with {' and '.join(sentence)}"


def again(argv: list[str], options: dict[str, str]) -> list[str]:
    """The command with these options in place of its own."""
    texts = list(argv)
    for name, value in options.items():
        if name in texts:
            texts[texts.index(name) + 1] = value
        else:
            texts += [name, value]
    return texts


def spoken(job: Job) -> str:
    """Why it failed, for somebody who looks at a page."""
    return page_words(job.message or sentences.NO_REASON)

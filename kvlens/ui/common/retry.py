"""What a refused job's sentence says would do, as a button: nobody has to type an option."""

from __future__ import annotations

import re

from kvlens.ui.common.jobs import Job

_ADVICE = re.compile(
    r"raise --budget to (?P<budget>\d\.\d+)(?: with --preset (?P<preset>\w+))?|run with --preset (?P<alone>\w+)"
)


def advice(job: Job) -> dict[str, str]:
    """Option of `kvlens run` -> the value that would do; empty where the sentence names none."""
    found = _ADVICE.search(job.message or "")
    if found is None or job.argv[3:4] != ["run"]:
        return {}
    share = found["budget"] and f"{float(found['budget']):.1%}"
    told = {"--budget": share, "--preset": found["preset"] or found["alone"]}
    return {name: value for name, value in told.items() if value}


def label(options: dict[str, str]) -> str:
    """The button: 'Run again with the budget 23.5%'."""
    return f"Run again with {' and '.join(f'the {name[2:]} {value}' for name, value in options.items())}"


def again(argv: list[str], options: dict[str, str]) -> list[str]:
    """The command with these options in place of its own."""
    made = list(argv)
    for name, value in options.items():
        if name in made:
            made[made.index(name) + 1] = value
        else:
            made += [name, value]
    return made


def spoken(message: str) -> str:
    """The sentence for somebody who looks at a page: options by their names."""
    return re.sub(r"--(?=[a-z])", "the ", message) if _ADVICE.search(message) else message

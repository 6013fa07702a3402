"""Chat templates rendered in a process of their own, with limits of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("render_worker.py")
SECONDS = 10
"""wall clock that a template may take; half of it as processor time"""
MEMORY = 1 << 30
"""bytes of address space that the process may have"""


class BadTemplate(ValueError):
    """What is wrong with a chat template, or with what was asked of it, in one sentence."""

    code = "template_failed"


def render(
    template: str,
    specials: Mapping[str, str],
    renders: Sequence[tuple[Sequence[Mapping[str, str]], bool]],
    arguments: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return the texts that a template makes of each (messages, whether an answer begins). Results are kept for the
    day: templates may write the date. arguments: what else the template may ask for, such as enable_thinking.

    Raises BadTemplate with one sentence when the template raises, takes too long or takes too much memory."""
    order = {
        "template": template,
        "specials": dict(specials),
        "arguments": dict(arguments or {}),
        "renders": [{"messages": list(messages), "begin_answer": begin} for messages, begin in renders],
    }
    return _rendered(json.dumps(order), date.today())


@lru_cache(maxsize=64)
def _rendered(order: str, day: date) -> tuple[str, ...]:
    try:
        ended = subprocess.run(
            [sys.executable, "-I", str(WORKER), str(SECONDS // 2), str(MEMORY)],
            input=order,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        answer = {"error": f"it takes more than {SECONDS} s or {MEMORY >> 20:,} MiB"}
    if "texts" not in answer:
        raise BadTemplate(f"the model's chat template fails ({answer['error']}): run with --chat off.")
    return tuple(answer["texts"])

"""Whether an output's final answer equals a mathematical one, by the package math-verify; there is no other comparison
here."""

from __future__ import annotations

import threading
from typing import Any

from kvlens.tasks.base import Unscored

SECONDS = 5
"""that an expression may be parsed or compared for"""


def package() -> Any:
    """The module math_verify. Raises Unscored with one sentence when it is not installed."""
    try:
        import math_verify
    except ImportError:
        raise Unscored(
            "this task's answers are compared by the package math-verify, which is not installed: "
            "pip install 'math-verify[antlr4_13_2]'.",
            code="package_missing",
            package="math-verify",
        ) from None
    return math_verify


def equal(answer: str, output: str) -> bool:
    """`answer` is LaTeX without its dollar signs. Raises Unscored as `package` does."""
    verifier = package()
    # The package limits its time by a signal, which only the main thread receives.
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None
    target = verifier.parse(f"${answer}$", parsing_timeout=limit)
    source = verifier.parse(output, parsing_timeout=limit)
    return bool(verifier.verify(target, source, timeout_seconds=limit))

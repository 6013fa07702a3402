"""When a page of generated tokens counts as uncertain (sec. 3.3): its two figures and their thresholds. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlens.methods.chess.params import ChessParameters
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.refusal import Refusal
from kvlens.shape import KVShape

UNCERTAIN, DUE = 1.0, 2.0
"""why a context was reconstructed, as the journal has it"""
SHIPPED = shipped(Path(__file__).parent)
"""model name -> its thresholds"""


def page_uncertainty(values: list[tuple[float, float]], varentropy: str) -> tuple[float, float]:
    """(entropy, varentropy of one distribution) of a page's tokens -> the page's mean entropy (nats) and varentropy
    (nats squared): 'page': population variance of the entropies, 'token': mean of the distributions' own."""
    mean = sum(entropy for entropy, _ in values) / len(values)
    spread = sum(
        (entropy - mean) ** 2 if varentropy == "page" else token_varentropy for entropy, token_varentropy in values
    )
    return mean, spread / len(values)


def read_thresholds(found: Content, params: ChessParameters, shape: KVShape) -> tuple[float, float]:
    """Entropy and varentropy above which a page of the parameters' size is uncertain. Raises ValueError with what to do
    where pages of that size were not measured."""
    sizes = found.figures["pages"]
    if str(params.page) not in sizes:
        raise Refusal(
            f"'{found.name}' has thresholds for pages of {', '.join(sizes)} tokens, not of {params.page}: set page to "
            f"one "
            "of them, threshold_entropy and threshold_varentropy, or trigger=fixed.",
            code="no_threshold_of_page",
            page=params.page,
            pages=sizes,
        )
    entry = sizes[str(params.page)]
    return float(entry["entropy_nats"]), float(entry[f"varentropy_{params.varentropy}_nats2"])


def thresholds(params: ChessParameters, calibrated: tuple[float, float] | None) -> tuple[float, float] | None:
    """The thresholds of a run: the parameters' own where they name some, else the calibrated ones. None: the trigger
    uses none."""
    if params.trigger != "dynamic":
        return None
    named = params.threshold_entropy, params.threshold_varentropy
    if calibrated is None:
        return named
    return named[0] if named[0] >= 0 else calibrated[0], named[1] if named[1] >= 0 else calibrated[1]


def is_uncertain(params: Any, limits: tuple[float, float] | None, entropy: float, varentropy: float) -> bool:
    """Return True if a page's two figures exceed the thresholds, as the parameter `condition` joins them."""
    assert limits is not None, "the trigger `dynamic` has thresholds"
    high = entropy > limits[0], varentropy > limits[1]
    return all(high) if params.condition == "and" else any(high)


class Trigger:
    """Owns the uncertainty of the generated tokens, and how many pages ago pages were selected."""

    def __init__(self, params: ChessParameters, calibrated: tuple[float, float] | None) -> None:
        self._params = params
        self.thresholds = thresholds(params, calibrated)
        self._uncertainty: list[tuple[float, float]] = []
        """(entropy, varentropy) of the distributions of all decode steps"""
        self.pages_since = 0
        """pages completed since the last selection"""

    def note_step(self, entropy: float, varentropy: float) -> None:
        """A decode step ended with a distribution of this entropy (nats) and varentropy (nats squared)."""
        self._uncertainty.append((entropy, varentropy))

    def judge(self, first_step: int) -> tuple[float, float]:
        """Return the mean entropy and varentropy of the page that begins with a decode step; NaN if first_step < 0:
        prefill fed some of its tokens."""
        if first_step < 0:
            return float("nan"), float("nan")
        page = self._uncertainty[first_step : first_step + self._params.page]
        return page_uncertainty(page, self._params.varentropy)

    def reason(self, entropy: float, varentropy: float) -> float:
        """Return why the page that was just completed calls for a selection: UNCERTAIN, DUE or 0 for no reason."""
        p = self._params
        if p.trigger == "dynamic":
            if is_uncertain(p, self.thresholds, entropy, varentropy):
                return UNCERTAIN
            return DUE if p.max_interval and self.pages_since >= p.max_interval else 0.0
        return DUE if p.trigger == "every" or (p.trigger == "fixed" and self.pages_since >= p.interval) else 0.0


THRESHOLDS = Calibration(
    "thresholds",
    "calibration",
    SHIPPED,
    "kvlens calibrate chess --model {model} --out FILE",
    "use trigger=fixed, which needs none",
    lambda params: params.trigger == "dynamic" and not params.thresholds_given,
    read_thresholds,
)

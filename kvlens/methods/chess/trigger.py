"""When a page of generated tokens counts as uncertain (sec. 3.3): its two figures and their thresholds. No torch."""

from __future__ import annotations

from pathlib import Path

from kvlens import REPOSITORY
from kvlens.methods.base import RunContext
from kvlens.methods.chess.params import ChessParameters

SHIPPED = REPOSITORY / "kvlens" / "demo" / "chess_thresholds.json"
"""the demo model's thresholds"""


def page_uncertainty(values: list[tuple[float, float]], varentropy: str) -> tuple[float, float]:
    """(entropy, varentropy of one distribution) of a page's tokens -> the page's mean entropy (nats) and varentropy
    (nats squared): 'page': population variance of the entropies, 'token': mean of the distributions' own."""
    mean = sum(entropy for entropy, _ in values) / len(values)
    spread = sum((entropy - mean) ** 2 if varentropy == "page" else own for entropy, own in values)
    return mean, spread / len(values)


def thresholds(params: ChessParameters, context: RunContext) -> tuple[float, float]:
    """Entropy and varentropy above which a page is uncertain. Raises ValueError with what to do when they are not
    known."""
    from kvlens.calibrate.provenance import read

    given = params.threshold_entropy, params.threshold_varentropy
    if params.thresholds_given:
        return given
    if not params.calibration and context.model_name != "demo":
        raise ValueError(
            f"chess: nothing says when '{context.model_name}' is uncertain: run `kvlens calibrate chess "
            f"--model M --out FILE` and set "
            "calibration=FILE, or use trigger=fixed, which needs no thresholds."
        )
    path = Path(params.calibration).expanduser() if params.calibration else SHIPPED
    found = read(path, "chess", context.shape.layers, context.shape.q_heads)
    try:
        sizes = found["pages"]
        if str(params.page) not in sizes:
            raise ValueError(
                f"'{path.name}' has thresholds for pages of {', '.join(sizes)} tokens, not of {params.page}: "
                f"set page to one of them, "
                "threshold_entropy and threshold_varentropy, or trigger=fixed."
            )
        entry = sizes[str(params.page)]
        measured = float(entry["entropy_nats"]), float(entry[f"varentropy_{params.varentropy}_nats2"])
    except (KeyError, TypeError):
        raise ValueError(f"'{path.name}' is not a calibration made by `kvlens calibrate chess`.") from None
    return given[0] if given[0] >= 0 else measured[0], given[1] if given[1] >= 0 else measured[1]

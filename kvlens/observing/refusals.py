"""Why a generation cannot be observed, or an observed run cannot be repeated: codes with typed values."""

from __future__ import annotations

from typing import Any

import torch


class CannotObserve(ValueError):
    """A generation that cannot be observed. Says what is wrong, then the remedy."""

    def __init__(self, code: str, sentence: str, **values: Any) -> None:
        super().__init__(sentence)
        self.code, self.values = code, values


def refuse_attention(name: str | None, known: tuple[str, ...]) -> CannotObserve:
    """Return the refusal of a model whose attention gives no masks that kvlens can read."""
    return CannotObserve(
        "attention_without_weights",
        f"the model attends through '{name}', which keeps its masks and weights to itself: call "
        "model.set_attn_implementation('sdpa') before kvlens.observe.",
        attention=name,
        works=known,
    )


def refuse_empty() -> CannotObserve:
    """Return the refusal of a block in which the model generated nothing."""
    return CannotObserve(
        "nothing_observed",
        "the model generated no token inside the block: call model.generate, or the model itself with a cache, there.",
    )


def refuse_layers(model: str, attention_layers: int, layers: int) -> CannotObserve:
    """Return the refusal of a model of which some layers do not attend (a hybrid), or none (a state-space model)."""
    return CannotObserve(
        "layers_without_attention",
        f"{model} has {attention_layers} attention layers of {layers}: kvlens observes decoders whose layers all "
        "attend.",
        attention_layers=attention_layers,
        layers=layers,
    )


def refuse_row(row: int, rows: int) -> CannotObserve:
    """Return the refusal of a batch row that the batch does not have."""
    return CannotObserve(
        "no_such_row", f"row={row} is not in a batch of {rows}: pass a row from 0 to {rows - 1}.", row=row, rows=rows
    )


def count_padding(mask: torch.Tensor, row: int) -> int:
    """Return how many tokens on the left of a row are padding. mask [B, n]: 0 where a token is. Raises CannotObserve
    for padding elsewhere: positions behind it are not the row's own."""
    pads = int((mask[row] == 0).sum())
    if bool(mask[row, :pads].any()):
        raise CannotObserve(
            "padding_right",
            f"row {row} has padding that is not on its left: set tokenizer.padding_side='left'.",
            row=row,
            padding=pads,
        )
    return pads


def refuse_beams(beams: int) -> CannotObserve:
    """Return the refusal of a beam search, whose rows exchange their pasts."""
    return CannotObserve(
        "beams",
        f"num_beams={beams} keeps several sequences, which exchange their caches: generate with num_beams=1.",
        beams=beams,
    )


def refuse_nested() -> CannotObserve:
    """Return the refusal of a second observation of the same model."""
    return CannotObserve("already_observed", "the model is observed already: leave the outer block first.")


def refuse_hold(code: str, sentence: str, **values: Any) -> CannotObserve:
    """Return the refusal of a hold or drop."""
    return CannotObserve(code, sentence, **values)

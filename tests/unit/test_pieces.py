"""Pieces of what is held: as commands and links write them, and of what a stored run held."""

from __future__ import annotations

import pytest

from kvlens.lens.pieces import Piece, pieces_of
from kvlens.metaparts import Held


@pytest.mark.parametrize(
    ("text", "piece", "what", "whose"),
    [
        ("40", Piece(40), "span 40", "all KV heads"),
        ("40.L2", Piece(40, None, 2), "span 40", "KV heads of L2"),
        ("0.L0.KV1", Piece(0, None, 0, 1), "span 0", "L0 KV1"),
        ("t396-401", Piece(tokens=(396, 402)), "tokens 396-401", "all KV heads"),
        ("t7.L2.KV0", Piece(tokens=(7, 8), layer=2, kv_head=0), "token 7", "L2 KV0"),
    ],
)
def test_a_piece_is_read_as_it_is_written(text: str, piece: Piece, what: str, whose: str) -> None:
    assert Piece.parse(text) == piece
    assert str(piece) == text
    assert (piece.describe_tokens(), piece.describe_heads()) == (what, whose)


@pytest.mark.parametrize("text", ["", "x", "40.KV1", "t", "t5-", "-3", "40.L", "4 0", "t9-3", "٤", "1234567890"])
def test_what_is_no_piece_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"--hold .*(give SPAN or|lower position)"):
        Piece.parse(text)


def test_a_piece_names_its_heads() -> None:
    assert Piece(1).heads(2, 2) == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert Piece(1, None, 1).heads(2, 2) == ((1, 0), (1, 1))
    assert Piece(1, None, 1, 0).heads(2, 2) == ((1, 0),)
    for piece, said in ((Piece(1, None, 2), "has 2 layers"), (Piece(1, None, 1, 2), "has 2 KV heads")):
        with pytest.raises(ValueError, match=said):
            piece.heads(2, 2)


def test_what_a_run_held_is_as_few_pieces_as_say_it() -> None:
    def held(*heads: tuple[int, int], span: int = 5, whole: bool = True) -> Held:
        return Held(span=span, tok_start=40, tok_end=48, heads=heads, from_step=0, whole=whole)

    assert pieces_of([held((0, 0), (0, 1), (1, 0), (1, 1))], 2, 2) == (Piece(5),)
    assert pieces_of([held((0, 0), (1, 1), (1, 0))], 2, 2) == (Piece(5, None, 0, 0), Piece(5, None, 1))
    assert pieces_of([held((1, 0), whole=False)], 2, 2) == (Piece(tokens=(40, 48), layer=1, kv_head=0),)
    assert pieces_of([held((0, 0)), held((0, 0))], 1, 1) == (Piece(5),)

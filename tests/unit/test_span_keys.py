"""Mean keys of spans against plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvlens.app.ui.spans.map import why_no_keys
from kvlens.recording.facts import span_keys
from kvlens.rows import SpanRow
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

HEAD = 4


@pytest.mark.parametrize("turned", [False, True])
def test_mean_span_keys_equal_a_plain_mean(turned: bool) -> None:
    keys = torch.randn(2, 3, 20, HEAD, generator=torch.Generator().manual_seed(1))
    rows = [
        SpanRow(0, "window", 15, 20, -1, ""),
        SpanRow(1, "sink", 0, 4, -1, ""),
        SpanRow(2, "page", 4, 15, -1, ""),
        SpanRow(3, "page", 9, 9, -1, ""),
    ]

    def rotate(k: torch.Tensor, positions: torch.Tensor, layer: int, back: bool) -> torch.Tensor:
        assert back
        return k * (positions + layer)[:, None]

    found = span_keys(keys, rows, rotate if turned else None)
    assert found is not None
    assert found.form == ("pre-rope" if turned else "post-rope")
    assert found.span.tolist() == [0, 1, 2]
    for layer in range(2):
        plain = keys[layer].double().numpy() * ((np.arange(20) + layer)[:, None] if turned else 1)
        for place, row in enumerate(rows[:3]):
            np.testing.assert_allclose(
                found.keys[layer, :, place], plain[:, row.tok_start : row.tok_end].mean(1), atol=1e-4
            )


def test_too_many_span_keys_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, rows = torch.ones(2, 3, 20, HEAD), [SpanRow(0, "window", 0, 20, -1, "")]
    monkeypatch.setattr("kvlens.instruments.MOST_KEY_BYTES", 4 * 2 * 3 * HEAD)
    assert span_keys(keys, rows, None) is not None
    assert span_keys(keys, [*rows, SpanRow(1, "page", 0, 5, -1, "")], None) is None
    assert span_keys(keys, [], None) is None


def test_a_page_tells_why_span_keys_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that they would take, where these are why."""
    uid = write_synthetic(tmp_path, 2, 4, 2, 2, 8, prompt_tokens=80, lens=False)
    with TraceReader.open(tmp_path, uid) as reader:
        assert "MB" not in why_no_keys(reader)
        monkeypatch.setattr("kvlens.app.ui.spans.map.MOST_KEY_BYTES", 1_000)
        assert "10.2 kB" in why_no_keys(reader)

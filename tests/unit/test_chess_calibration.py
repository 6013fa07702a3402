"""CHESS's thresholds: how pages are cut and percentiles taken, the file, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import raises_code
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.lab.calibrate.methods.chess import QUESTIONS, calibrate, excerpts, generated, pages_of, quantile
from kvlens.methods.calibration import calibrated
from kvlens.methods.chess.method import Chess
from kvlens.methods.chess.params import ChessParameters
from kvlens.methods.chess.trigger import page_uncertainty
from kvlens.methods.run_inputs import RunContext
from kvlens.shape import KVShape
from kvlens.text.prompts import BadPrompt, PromptText


def test_pages_are_cut_where_the_method_cuts_them() -> None:
    """Positions 10..24 in pages of 4: [12, 16), [16, 20), [20, 24) lie in the answer whole."""
    values = [(float(position), 0.0) for position in range(10, 25)]
    assert [[int(e) for e, _ in page] for page in pages_of((10, values), 4)] == [
        list(range(a, a + 4)) for a in (12, 16, 20)
    ]
    assert pages_of((8, values[:4]), 4) == [values[:4]]
    assert pages_of((9, values[:4]), 4) == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(1, 99))
def test_quantile_is_numpys(values: list[float], percentile: float) -> None:
    assert quantile(values, percentile) == pytest.approx(np.percentile(values, percentile), abs=1e-9)


def test_varentropy_of_a_page_by_hand() -> None:
    assert page_uncertainty([(1.0, 0.2), (3.0, 0.6)], "page") == (2.0, 1.0)
    assert page_uncertainty([(1.0, 0.2), (3.0, 0.6)], "token") == (2.0, pytest.approx(0.4))


def test_a_calibration_is_written_and_used(demo: Any, tmp_path: Path) -> None:
    sources = generated(demo, 2, 128)
    assert [s.task for s in sources] == ["list", "list"]
    written = calibrate(demo, sources, tmp_path / "t.json", 128, 50.0)
    found = json.loads(written.read_text())
    assert found["provenance"]["prompts"] == 2
    assert found["pages"]["8"]["pages"] >= 10
    params = ChessParameters(page=8, calibration=str(written))
    assert thresholds_of(params, demo.shape) == (
        found["pages"]["8"]["entropy_nats"],
        found["pages"]["8"]["varentropy_page_nats2"],
    )
    own = ChessParameters(page=8, calibration=str(written), varentropy="token", threshold_entropy=2.0)
    assert thresholds_of(own, demo.shape) == (2.0, found["pages"]["8"]["varentropy_token_nats2"])


def thresholds_of(params: ChessParameters, shape: KVShape, name: str = "other") -> tuple[float, float] | None:
    context = RunContext(shape, 100, 8, None, 1, 0, name, torch.float32, torch.device("cpu"))
    return Chess(params, calibrated(Chess, params, context))._trigger.thresholds


def test_what_is_said_without_thresholds(demo: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kvlens calibrate chess --model other --out FILE.*trigger=fixed"):
        thresholds_of(ChessParameters(), demo.shape)
    with pytest.raises(ValueError, match="does not exist"):
        thresholds_of(ChessParameters(calibration=str(tmp_path / "no.json")), demo.shape)
    with raises_code("no_threshold_of_page", page=24):
        thresholds_of(ChessParameters(page=24), demo.shape, "demo")
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(ValueError, match="not a calibration"):
        thresholds_of(ChessParameters(calibration=str(tmp_path / "odd.json")), demo.shape)
    origin = {"layers": demo.shape.layers, "q_heads": demo.shape.q_heads}
    (tmp_path / "bare.json").write_text(json.dumps({"method": "chess", "provenance": origin, "pages": {"8": {}}}))
    with raises_code("other_file", file="bare.json"):
        thresholds_of(ChessParameters(page=8, calibration=str(tmp_path / "bare.json")), demo.shape)
    assert thresholds_of(ChessParameters(trigger="fixed"), demo.shape) is None
    assert thresholds_of(ChessParameters(threshold_entropy=1.0, threshold_varentropy=0.0), demo.shape) == (1.0, 0.0)


@pytest.mark.parametrize("model", ["demo", "smollm2"])
def test_the_shipped_thresholds_say_where_they_come_from(model: str) -> None:
    from kvlens.methods.chess.trigger import SHIPPED

    found = json.loads(SHIPPED[model].read_text())
    assert found["provenance"]["model"] == model
    assert found["provenance"]["percentile"] == 99.0
    for page in ("8", "16", "32"):
        assert found["pages"][page]["pages"] >= 100
        assert found["pages"][page]["above_both"] <= 0.02 * found["pages"][page]["pages"]


def test_excerpts_are_whole_sentences_with_a_question_behind_them(demo: Any) -> None:
    text = PromptText(
        " ".join(f"The mill of town {number} grinds barley for the whole valley." for number in range(200))
    )
    made = excerpts(demo, [text], 4, 64)
    assert [prompt.text.rpartition("\n\n")[2] for prompt in made] == [*QUESTIONS, QUESTIONS[0]]
    for prompt, length in zip(made, (512, 1024, 512, 1024), strict=True):
        body = prompt.text.rpartition("\n\n")[0]
        assert body.startswith(text.text[:16])
        assert body.endswith("valley.")
        assert 0.9 * length < len(demo.tokenizer.encode(prompt.text)) <= length + 40
    assert made == excerpts(demo, [text], 4, 64), "the same prompts from the same texts"
    with raises_code("text_too_short"):
        excerpts(demo, [PromptText("One sentence. Another.")], 1, 64)


def test_bad_requests_give_one_sentence(demo: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        calibrate(demo, [PromptText("a b")], tmp_path / "t.json", percentile=100.0)
    with pytest.raises(ValueError, match="no text"):
        calibrate(demo, [], tmp_path / "t.json")
    with pytest.raises(ValueError, match="percentile 99 needs 100"):
        calibrate(demo, [PromptText("The road from Perth to")], tmp_path / "t.json", max_new=24)
    with raises_code("model_too_short", BadPrompt):
        generated(demo, 1, demo.max_positions)
    result = CliRunner().invoke(app, ["calibrate", "chess", str(tmp_path / "none.txt")])
    assert isinstance(result.exception, ValueError)
    assert "none.txt" in str(result.exception)

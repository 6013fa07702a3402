"""Free text as a measure: the same passage for every arm, full KV as zero, the controls beside the methods."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from support import raises_code

from kvlens.cli.main import main
from kvlens.engine import batch
from kvlens.engine.engine import Engine
from kvlens.lab import results as resultfiles
from kvlens.lab.bench.freetext import measure
from kvlens.lab.bench.passages import begins, distinct, passage
from kvlens.lab.bench.passagetrials import Passages
from kvlens.lab.bench.textpage import markdown
from kvlens.lab.bench.textrequest import FLOORS, FreeTextRequest
from kvlens.lab.commands.freetext import _came
from kvlens.statistics import of_mean
from kvlens.tasks.texts import sentences

SMALL: dict[str, Any] = {
    "model": "demo",
    "methods": ("full", "random"),
    "budgets": ("60%",),
    "length": 200,
    "tokens": 64,
    "passages": 1,
}


def test_a_passage_is_whole_text_from_the_beginning_of_a_sentence(demo: Any) -> None:
    first = FreeTextRequest(**SMALL).first_seed
    tokenizer, most = demo.tokenizer, demo.max_positions
    context, fed = passage(first, 200, 64, tokenizer, most)
    assert (len(context.ids), len(fed)) == (200, 64)
    assert passage(first, 200, 64, tokenizer, most) == (context, fed)
    assert passage(first + 1, 200, 64, tokenizer, most)[0].ids != context.ids
    known = " ".join((*sentences(), *sentences()))
    said = "".join(context.pieces[1:]) + tokenizer.decode(fed)
    assert known.find(said[:400]) >= 0
    assert any(said.startswith(sentence[:60]) for sentence in sentences())
    with raises_code("model_too_short", tokens=264, most=263):
        passage(first, 200, 64, tokenizer, 263)


def test_no_passage_counts_twice() -> None:
    """Of the first thirty as they are drawn, the 23rd begins where the 12th does: the 31st stands for it."""
    first = FreeTextRequest(**SMALL).first_seed
    assert begins(first + 22) == begins(first + 11)
    found = distinct(first, 30)
    assert found == [index for index in range(31) if index != 22]
    assert len({begins(first + index) for index in found}) == 30
    with pytest.raises(ValueError, match="ask for fewer"):
        distinct(first, len(sentences()) + 1)


def test_full_kv_is_zero_and_what_keeps_less_is_not(demo: Any) -> None:
    at_hand = Passages(FreeTextRequest(**SMALL), Engine(demo))
    at_hand.turn(0)
    full, less = at_hand.run("full", "", "float32"), at_hand.run("random", "60%", "float32")
    assert (full["kl"], full["agreement"], full["tokens"]) == (0.0, 1.0, 64)
    assert full["nats"] == full["full_nats"] == less["full_nats"]
    assert less["kl"] > 1e-6
    assert 0 <= less["agreement"] <= 1
    assert less["coverage"] < full["coverage"]
    assert "infeasible" in at_hand.run("random", "1%", "float32")


def test_the_table_has_the_noise_floor_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, kept = tmp_path / "text.json", tmp_path / "text.jsonl"
    argv = ["kvlens", "bench", "text", "--methods", "random", "--budgets", "60%", "--length", "200", "--passages", "1"]
    monkeypatch.setattr(sys, "argv", [*argv, "--model", "demo", "--out", str(out), "--kept", str(kept)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said, result = capsys.readouterr().out, json.loads(out.read_text())
    assert markdown(result) in said
    floors = [line for line in result["lines"] if line["dtype"] != "float32"]
    assert [line["dtype"] for line in floors] == list(FLOORS)
    (random,) = (line for line in result["lines"] if line["method"] == "random")
    assert all(0 < line["kl"] < random["kl"] for line in floors), "rounding is less than losing two fifths"
    assert said.count("noise floor") == len(FLOORS)
    done: list[dict[str, Any]] = []
    again = measure(
        FreeTextRequest(**SMALL | {"methods": ("random",)}), kept, lambda n, of, row: done.append(row), done.append
    )
    assert not done
    assert again["lines"] == result["lines"]


def test_trials_that_share_their_steps_differ_by_rounding_alone(tmp_path: Path) -> None:
    asked = SMALL | {"methods": ("random", "snapkv", "h2o"), "budgets": ("40%", "60%")}

    def measured(batch: int) -> dict[str, dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        kept = tmp_path / f"{batch}.jsonl"
        measure(FreeTextRequest(**asked, batch=batch), kept, lambda done, total, row: rows.append(row))
        assert len(rows) == 8
        return {row["key"]: row for row in rows if row["dtype"] == "float32"}

    apart, together = measured(1), measured(4)
    assert {row["batched"] for row in apart.values()} == {1}
    assert all(1 < row["batched"] <= 4 for row in together.values())
    for key, row in together.items():
        alone = apart[key]
        assert row["kl"] == pytest.approx(alone["kl"], rel=1e-3)
        assert row["coverage"] == pytest.approx(alone["coverage"], rel=1e-4)
        assert (row["resident_share"], row["read_share"]) == (alone["resident_share"], alone["read_share"])


def test_a_model_that_cannot_share_steps_keeps_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "changing_type", lambda config: "dynamic")
    asked, kept = FreeTextRequest(**SMALL, batch=2), tmp_path / "kept.jsonl"
    with raises_code("batch_rotary"):
        measure(asked, kept, lambda done, total, row: None)
    assert not kept.exists() or not kept.read_text()


def test_a_refused_trial_is_told_with_its_reason() -> None:
    row = {"key": "0/sekv/20%/float32", "refused": "reason"}
    assert _came(row) == row["refused"]
    assert "12.3%" in _came({"infeasible": 0.123})
    assert "0.5000" in _came({"kl": 0.5})


def test_rows_of_another_preset_stand_behind_the_methods_own() -> None:
    """Of a published table: SeKV with its trained router, and as it was before."""
    path = Path(resultfiles.__file__).with_name("text-smollm2.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    (trained,) = (line for line in result["lines"] if line["method"] == "sekv")
    (untrained,) = result["variants"]
    rows = [line.split(" | ") for line in markdown(result).splitlines() if line.startswith("| SeKV")]
    assert [row[0] for row in rows] == ["| SeKV", "| SeKV (untrained router)"]
    for row, line in zip(rows, (trained, untrained), strict=True):
        assert row[3].split()[0] == f"{line['kl']:.4f}"
    assert untrained["about"]["date"] in markdown(result).splitlines()[-1]


@pytest.mark.parametrize(("changed", "said"), [({"tokens": 63}, "64"), ({"budgets": ("5tok",)}, "shares of full KV")])
def test_refusals(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FreeTextRequest(**SMALL | changed)


def test_the_interval_of_a_mean_is_students() -> None:
    """Quantiles of tables: 2.571 at 5 degrees of freedom, 2.262 at 9, 2.045 at 29."""
    for n, quantile in ((6, 2.571), (10, 2.262), (30, 2.045)):
        values = [float(value) for value in range(n)]
        found = of_mean(values)
        assert found is not None
        half = quantile * stdev(values) / n**0.5
        assert found == pytest.approx((fmean(values) - half, fmean(values) + half), abs=1e-3)
    assert of_mean([1.0] * 5) is None

"""`kvlens bench rates`: what is counted as missed, corrected, expanded and reused, by hand and against other columns of
the same steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import raises_code
from test_cli import kvlens

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.lab.bench.rates import RatesRequest, Watch, arms, figures
from kvlens.lab.bench.trialprompts import Prompts
from kvlens.lab.gpu.rates import read
from kvlens.records import StepRecord


def step(number: int, kv: dict[str, Any], head: dict[str, Any] | None = None, born: tuple[int, ...] = ()) -> Any:
    spans = [SimpleNamespace(span=span, state="coarse") for span in born]
    columns = {name: np.array(values, dtype=float) for name, values in kv.items()}
    return SimpleNamespace(step=number, kv=columns, head=head or {}, spans=spans)


def prefilled(coarse: tuple[int, ...] = (), kept: tuple[int, ...] = ()) -> Any:
    spans = [SimpleNamespace(span=span, state="coarse") for span in coarse]
    return SimpleNamespace(spans=[*spans, *(SimpleNamespace(span=span, state="resident") for span in kept)])


def watched(names: tuple[str, ...], steps: list[Any], prefill: Any = None) -> dict[str, list[tuple[float, float]]]:
    watch = Watch(names)
    watch.prefill(prefill or prefilled())
    for record in steps:
        watch.step(record)
    return watch.counts


def test_misses_are_of_units_and_not_of_heads() -> None:
    """One KV head lacks 1 of 8 pages, the other both of its 2: 3 of 10, where a mean over heads would say 0.56."""
    found = watched(
        ("miss",),
        [
            step(0, {"n_recalled": [[9, 9]], "n_reused": [[0, 0]]}),
            step(1, {"n_recalled": [[1, 2]], "n_reused": [[7, 0]]}),
        ],
    )
    assert found == {"miss": [(3, 10)]}, "and step 0, which cannot have anything, is left out"
    assert figures(found["miss"])["mean"] == 0.3


def test_heads_that_do_not_speculate_are_not_counted_as_corrected() -> None:
    corrected = np.array([[np.nan, np.nan, np.nan, np.nan], [1, 1, 0, 0], [1, 1, 1, 1]])
    assert watched(("correction",), [step(1, {}, {"corrected": corrected})]) == {"correction": [(6, 8)]}


def test_expanded_spans_are_of_those_alive_as_summaries() -> None:
    kv = {"n_recalled": [[1, 0], [0, 0]], "n_reused": [[1, 2], [0, 0]]}
    steps = [step(0, kv), step(1, kv, born=(7, 8)), step(2, kv)]
    found = watched(("zoom",), steps, prefilled((1, 2, 3), (0, 4)))
    assert found["zoom"] == [(4, 5 * 4), (4, 5 * 4)], "spans are born before a step's attention"


def test_reuse_is_of_tokens() -> None:
    kv = {"recalled_tokens": [[10, 0]], "reused_tokens": [[30, 40]], "n_recalled": [[9, 0]], "n_reused": [[1, 1]]}
    assert watched(("reuse",), [step(1, kv)]) == {"reuse": [(70, 80)]}


def test_shares_are_of_all_steps_together_and_percentiles_over_steps() -> None:
    counts = [(0, 0), *((float(n), 10.0) for n in range(11)), (90.0, 100.0)]
    found = figures(counts)
    assert found["mean"] == round((55 + 90) / 210, 4)
    shares = [*(n / 10 for n in range(11)), 0.9]
    assert (found["p10"], found["p90"]) == tuple(round(float(x), 4) for x in np.percentile(shares, [10, 90]))
    with raises_code("no_step"):
        figures([(0, 0)])


class Both(Watch):
    """Keeps the steps beside."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self.steps += [record] if record.step else []


@pytest.fixture(scope="module")
def recorded(demo: Any) -> Callable[[str], tuple[Both, Any]]:
    """An answer of twelve tokens under an arm: its steps and counts."""
    engine = Engine(demo)
    made = Prompts(engine)

    def run(arm: str) -> tuple[Both, Any]:
        asked, prompt, ahead = made("list", 512, 0)
        answer = tuple(demo.tokenizer.encode(asked.answer, add_special_tokens=False))[:12]
        method, both = methods.get(arms()[arm].method), Both(arms()[arm].rates)
        params = methods.make_parameters(method, "demo", dict(arms()[arm].changes))
        engine.run(
            prompt,
            method,
            params,
            Budget.parse("30%"),
            Options(forced=answer, coverage=False, oracle="off"),
            both,
            read=ahead,
        )
        assert len(both.steps) == 11
        return both, params

    return run


def came(record: StepRecord) -> int:
    """Copies to the device, each of one unit of one KV head."""
    return sum(transfer.direction == "h2d" for transfer in record.transfers)


def test_freekv_against_its_copies_rankings_and_similarities(recorded: Any, demo: Any) -> None:
    both, params = recorded("freekv")
    for record, miss, correction in zip(both.steps, both.counts["miss"], both.counts["correction"], strict=True):
        assert miss == (came(record), record.scores.chosen.sum())  # type: ignore[union-attr]
        waits = record.kv["similarity"] < params.tau
        assert correction == (waits.sum() * demo.shape.group, waits.size * demo.shape.group)
        assert not (record.kv["blocking_bytes"][~waits]).any()
        assert (record.kv["blocking_bytes"] == record.kv["h2d_bytes"])[waits].all()
    assert 0 < figures(both.counts["correction"])["mean"] < 1


def test_blocking_recall_waits_for_every_byte(recorded: Any) -> None:
    both, _ = recorded("blocking")
    for record, miss in zip(both.steps, both.counts["miss"], strict=True):
        assert miss == (came(record), record.scores.chosen.sum())  # type: ignore[union-attr]
        assert (record.kv["blocking_bytes"] == record.kv["h2d_bytes"]).all()
    assert sum(came(record) for record in both.steps) > 0


def test_sekv_against_its_copies_and_its_heads_zooms(recorded: Any, demo: Any) -> None:
    both, _ = recorded("sekv")
    heads = demo.shape.layers * demo.shape.kv_heads
    for record, miss, zoom in zip(both.steps, both.counts["miss"], both.counts["zoom"], strict=True):
        assert miss[0] == came(record)
        assert miss[1] == zoom[0]
        count, share = record.head["n_zoomed"], record.head["zoom_rate"]
        assert zoom[1] / heads == pytest.approx(count[count > 0] / share[count > 0])
        by_group = count.reshape(*record.kv["n_recalled"].shape, -1)
        assert by_group.max(-1).sum() <= zoom[0] <= by_group.sum()
    assert len({whole for _, whole in both.counts["zoom"]}) > 1, "a span was born on the way"
    assert 0 < figures(both.counts["miss"])["mean"] < 1


def test_sentkv_against_its_bytes_and_its_token_budget(recorded: Any, demo: Any) -> None:
    both, _ = recorded("sentkv")
    heads = demo.shape.layers * demo.shape.kv_heads
    for record, (here, wanted) in zip(both.steps, both.counts["reuse"], strict=True):
        assert (wanted - here) * demo.shape.head_token_bytes == record.kv["h2d_bytes"].sum()
        quota = next(row.values[3] for row in record.journal if row.name == "token_budget")
        assert wanted == quota * heads


def test_the_command_writes_what_the_gpu_benchmark_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rates.json"
    kvlens(
        "bench", "rates", "--tasks", "note", "--length", "512", "--prompts", "1", "--budget", "30%", "--out", str(out)
    )
    assert "freekv: miss 0." in capsys.readouterr().out
    held, table = json.loads(out.read_text()), read(out)
    assert set(held["methods"]) == set(arms())
    assert {"kvlens", "torch", "machine", "date", "presets", "origins"} <= set(held["about"])
    line = table.lines.get("freekv")
    assert line is not None
    assert line.rates["correction"] == held["methods"]["freekv"]["rates"]["correction"]["mean"]
    assert line.prompts == 1
    assert [sum(method["presets"].values()) for method in held["methods"].values()] == [1] * len(arms())
    assert "tasks note of 512 tokens" in table.about


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": "4MB"}, "at a share of full KV"),
        ({"tasks": ("nonsense",)}, "unknown task 'nonsense'"),
        ({"prompts": 0}, "greater than"),
    ],
)
def test_bad_requests_are_refused_before_a_model_is_loaded(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RatesRequest(**wrong)

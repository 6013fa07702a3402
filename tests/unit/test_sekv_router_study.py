"""The tables of docs/evidence/sekv-router.md: counts by hand, and a page whose marks are filled."""

from __future__ import annotations

from typing import Any

import pytest

from kvlens.lab.studies.sekv_router import ARMS, CELLS, finished, read_rows
from kvlens.lab.studies.sekv_router_page import NAMES, curve, fill, lines
from kvlens.methods.naming import display_name
from kvlens.methods.sekv.method import SeKV


def row(arm: str, index: int, exact: float | None, **more: Any) -> dict[str, Any]:
    """A row of a study; exact None: the budget could not be kept."""
    place = {"cell": CELLS[0].name, "arm": arm, "index": index, "rule": "resident bytes", "preset": "fit"}
    if exact is None:
        return place | {"infeasible": 0.3}
    figures = {"score": exact, "coverage": 0.5, "attended_tokens": 10.0, "prompt_tokens": 100, "passed": True}
    shares = {"resident_share": 0.2, "read_share": 0.1, "h2d_bytes_per_step": 1000.0}
    return place | {"exact": exact} | figures | shares | more


def test_lines_count_prompts_that_one_router_alone_answers() -> None:
    decided = {
        "zoom_rate": 0.1,
        "asked": 30.0,
        "granted": 20.0,
        "refused": 10.0,
        "refused_tokens": 0.4,
        "logprob": -1.0,
    }
    rows = [row("trained", i, float(i < 3), decided=decided | {"asked": 30.0 + i}) for i in range(6)]
    rows += [row("untrained", i, float(i == 3), decided=decided | {"logprob": -1.5 - i}) for i in range(6)]
    rows += [row("no-coarse", 0, None)]
    by_arm = {line["arm"]: line for line in lines(rows)}
    assert set(by_arm) == {"trained", "untrained", "no-coarse"}
    assert (by_arm["trained"]["gained"], by_arm["trained"]["lost"], by_arm["trained"]["n"]) == (3, 1, 6)
    counted = by_arm["trained"]["decided"]
    assert (counted["n"], counted["asked"]) == (6, pytest.approx(32.5))
    assert sum(counted["logprob_more"]) / 2 == pytest.approx(3.0), "0.5 to 5.5 nats"
    assert (by_arm["no-coarse"]["n"], by_arm["no-coarse"]["smallest_feasible"]) == (0, 0.3)


def test_a_point_of_the_curve_is_the_mean_since_the_last_one() -> None:
    parts = ("loss", "distill", "zoom", "recon", "budget", "zoom_rate", "hit_rate", "rank_k", "rank_v")
    log: list[dict[str, Any]] = [{"step": i, "length": 8} | dict.fromkeys(parts, float(i)) for i in range(1, 5)]
    log[0]["hit_rate"] = float("nan")
    for place in (1, 3):
        log[place] |= {f"held_out_{name}": 7.0 for name in parts}
    points = curve(log)
    assert [(point["step"], point["loss"], point["hit_rate"]) for point in points] == [(2, 1.5, 2.0), (4, 3.5, 3.5)]


def test_arms_are_called_what_their_parameters_are() -> None:
    assert set(NAMES) == {"full", *ARMS}
    for arm, changes in ARMS.items():
        assert NAMES[arm].startswith(display_name(SeKV.name, changes))


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"cell": "a", "index": 0, "arm": "full"}\n{"cell": "a", "ind')
    assert read_rows([path]) == [{"cell": "a", "index": 0, "arm": "full"}]
    assert finished([path, tmp_path / "none"]) == {("a", 0): {"full"}}


def test_a_page_is_filled_between_its_marks_and_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "kvlens.lab.studies.sekv_router_page"
    monkeypatch.setattr(f"{module}.training_tables", lambda result: iter(["| steps |"]))
    cell = lines([row("trained", 0, 1.0), row("untrained", 0, 0.0), row("no-coarse", 0, None)])
    result = {"cells": {CELLS[0].name: cell}}
    blank = "a\n<!-- training: begin -->\n<!-- training: end -->\nb\n<!-- rows: begin -->\n<!-- rows: end -->\nc\n"
    page = fill(blank, result)
    assert page == fill(page, result)
    assert page.startswith("a\n<!-- training: begin -->\n| steps |\n<!-- training: end -->\nb\n")
    assert "1.00 (0.21-1.00), 1 | 1 / 0 |" in page
    assert "infeasible, needs 30%" in page

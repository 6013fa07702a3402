"""Figures of the Spans page: boundaries where the spans are, colours of what was recorded, PCA as linear algebra has
it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.app.data import spanmap as umapjob
from kvlens.app.figures.projection import pca, projection_figure
from kvlens.app.figures.spancolors import UNKNOWN, shown
from kvlens.app.figures.spanlanes import Curve, Lane
from kvlens.app.figures.spanlengths import length_histogram
from kvlens.app.figures.spans import surprisal_figure
from kvlens.app.figures.states import STATE_COLORS
from kvlens.app.ui.spans import map as spansmap
from kvlens.spans import Span
from tests.synthetic import write_synthetic


@pytest.fixture
def own() -> pd.DataFrame:
    """Three spans of twelve tokens; nothing is known of the second."""
    return pd.DataFrame(
        {
            "span": [4, 7, 9],
            "kind": ["sink", "entropy", "entropy"],
            "tok_start": [0, 2, 8],
            "tok_end": [2, 8, 12],
            "length": [2, 6, 4],
            "text": ["ab", "<b>x</b>", "end"],
            "mass": [0.5, np.nan, 0.1],
            "state": ["resident", None, "cold"],
        }
    )


@pytest.fixture
def curve() -> Curve:
    nats = np.array([np.nan, 1, 2, 3, 1, 1, 1, 1, 5, 1, 1, 1.0])
    return Curve(0, [f"t{i}" for i in range(12)], nats, [[7, 9]])


def named(figure: object, name: str) -> object:
    return next(trace for trace in figure.data if trace.name == name)  # type: ignore[attr-defined]


def test_boundaries_threshold_lanes_and_clicks(own: pd.DataFrame, curve: Curve) -> None:
    lane = Lane("pages", [Span(0, 4, "page", "r"), Span(4, 8, "page", "r"), Span(8, 10, "anchor", "r")])
    figure = surprisal_figure(curve, own, "mass", "mass (share)", [lane], [(3.5, "threshold"), (4.0, "PREVIEW")], 7)
    edges = named(figure, "boundaries of this run")
    assert list(edges.x[::3]) == [-0.5, 1.5, 7.5]
    assert (list(named(figure, "threshold").y), list(named(figure, "PREVIEW").y)) == ([3.5, 3.5], [4, 4])
    points = named(figure, "surprisal")
    assert [item[0] for item in points.customdata] == [4, 4, 7, 7, 7, 7, 7, 7, 9, 9, 9, 9]
    assert points.hovertext[0] == "token 0 't0'<br>surprisal not recorded<br>span 4"
    cells = named(figure, "pages")
    assert list(cells.x) == [-0.5, 3.5, 7.5, 9.5]
    assert list(cells.z[0]) == [0, 1, 2]
    assert list(figure.layout.yaxis2.ticktext) == ["this run's spans", "pages"]
    assert [a.text for a in figure.layout.annotations] == ["needle"]
    frames = [shape for shape in figure.layout.shapes if shape.line.color == "#D55E00"]
    assert {(shape.x0, shape.x1) for shape in frames} == {(1.5, 7.5)}


def test_spans_without_a_value_are_grey_and_never_zero(own: pd.DataFrame, curve: Curve) -> None:
    figure = surprisal_figure(curve, own, "mass", "mass (share)", [], [], None)
    known, missing = named(figure, "recorded"), named(figure, UNKNOWN)
    assert list(known.marker.color) == [0.5, 0.1]
    assert [item[0] for item in missing.customdata] == [7]
    assert missing.marker.color == "#9a9a9a"
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 0.5)
    assert not re.search(r"mass \(share\): [\d.]", missing.hovertext[0])
    assert re.search(r"mass \(share\): [\d.]", known.hovertext[0])
    assert "&lt;b&gt;x" in missing.hovertext[0]


def test_states_have_their_colours(own: pd.DataFrame, curve: Curve) -> None:
    figure = surprisal_figure(curve, own, "state", "state", [], [], None)
    assert named(figure, "in host memory").marker.color == STATE_COLORS["cold"]
    assert [item[0] for item in named(figure, "in host memory").customdata] == [9]
    assert [item[0] for item in named(figure, UNKNOWN).customdata] == [7]
    assert figure.layout.coloraxis.colorbar.title.text is None


def test_a_colour_scale_is_there_only_where_a_span_has_a_number(own: pd.DataFrame, curve: Curve) -> None:
    figure = surprisal_figure(curve, own.assign(mass=np.nan), "mass", "mass (share)", [], [], None)
    assert figure.layout.coloraxis.cmin is None
    assert [item[0] for item in named(figure, UNKNOWN).customdata] == [4, 7, 9]


def test_a_part_of_a_long_text_shows_its_own_spans_only(own: pd.DataFrame) -> None:
    part = Curve(9, ["a", "b"], np.array([1.0, 2.0]), [[0, 3]])
    lane = Lane("pages", [Span(0, 4, "page", "r"), Span(8, 12, "page", "r")])
    figure = surprisal_figure(part, own, "mass", "mass (share)", [lane], [], None)
    assert [item[0] for item in named(figure, "surprisal").customdata] == [9, 9]
    assert list(named(figure, "pages").x) == [7.5, 11.5]
    assert not figure.layout.annotations
    assert list(figure.layout.xaxis.range) == [8.5, 10.5]


def test_lengths_are_counted_by_kind() -> None:
    figure = length_histogram(np.array([4, 8, 8, 90]), ["sink", "page", "page", "page"], 8)
    assert [(trace.name, list(trace.x)) for trace in figure.data] == [("page (3)", [8, 8, 90]), ("sink (1)", [4])]
    assert figure.layout.shapes[0].x0 == 8
    assert figure.data[0].xbins.size == 3


def test_text_is_escaped_and_shortened() -> None:
    assert shown("a\n<i>") == "a⏎&lt;i&gt;"
    assert shown("x" * 200, 10) == "xxxxx … xxxxx"


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 30), st.integers(2, 12), st.integers(0, 2**31))
def test_pca_is_the_eigenvectors_of_the_covariance(rows: int, columns: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, columns)) * np.arange(1, columns + 1) + 5
    points, shares = pca(x.astype(np.float32))
    values, vectors = np.linalg.eigh(np.cov(x.astype(np.float32).astype(np.float64).T))
    best = vectors[:, ::-1][:, :2]
    best = best * np.sign(best[np.abs(best).argmax(0), [0, 1]])
    want = (x.astype(np.float32).astype(np.float64) - x.astype(np.float32).mean(0, dtype=np.float64)) @ best
    scale = np.abs(want).max()
    apart = values[::-1][0] - values[::-1][1] > 1e-3 * values.max() and (
        columns < 3 or values[::-1][1] - values[::-1][2] > 1e-3 * values.max()
    )
    if apart:  # otherwise directions are not unique
        np.testing.assert_allclose(points, want, atol=1e-6 * scale)
    np.testing.assert_allclose(shares, values[::-1][:2] / values.sum(), atol=1e-9)


def test_pca_of_what_has_no_components() -> None:
    for x, size in ((np.zeros((0, 4)), 0), (np.ones((1, 4)), 1), (np.ones((5, 4)), 5)):
        points, shares = pca(x)
        assert points.shape == (size, 2)
        assert not points.any()
        assert not shares.any()
    points, shares = pca(np.array([[0.0], [2.0]]))
    np.testing.assert_allclose(points, [[-1, 0], [1, 0]], atol=1e-12)
    np.testing.assert_allclose(shares, [1, 0], atol=1e-12)


def test_the_map_marks_the_needle_with_a_star_and_the_selection_with_a_ring(own: pd.DataFrame) -> None:
    points = own.assign(x=[0.0, 1.0, 2.0], y=[5.0, 6.0, 7.0])
    figure = projection_figure(points, ("a", "b"), "mass", "mass (share)", 9, "t", [4], True)
    known = named(figure, "recorded")
    assert [item[0] for item in known.customdata] == [4, 9]
    assert list(known.marker.color) == [0.5, 0.1]
    assert [trace.name for trace in figure.data][-2:] == ["holds the needle", "selected span"]
    assert (list(figure.data[-2].x), figure.data[-2].marker.symbol) == ([0.0], "star-open")
    assert (figure.layout.yaxis.scaleanchor, figure.data[-2].hoverinfo) == ("x", "skip")
    ring = named(figure, "selected span")
    assert (list(ring.x), list(ring.y)) == ([2.0], [7.0])


# -------------------------------------------------------------------------------------------------------------------
# UMAP's process
TWICE = """
import sys
from kvlens.app.data import spanmap
for out in sys.argv[5:]:
    assert spanmap.main([*sys.argv[1:5], "5", out]) == 0
"""


def test_umap_in_its_process_is_repeatable_and_stored(tmp_path: Path) -> None:
    """umap-learn's code as Python, as it is for so few spans."""
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 24, prompt_tokens=300)
    out = [tmp_path / "maps" / name for name in ("a.json", "b.json")]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path), uid, "1", "0", *map(str, out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    maps = [json.loads(path.read_text(encoding="utf-8")) for path in out]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["phase"] for report in said[:4]] == ["load", "import", "fit", "done"]
    assert maps[0] == maps[1]
    spans = np.array(maps[0]["spans"])
    found = spansmap.load_map(out[0], spans, umapjob.settings(1, 0, 5))
    assert found is not None
    assert found.shape == (len(spans), 2)
    assert np.ptp(found, axis=0).min() > 0


@pytest.mark.parametrize("spans", [umapjob.INTERPRETED, umapjob.INTERPRETED + 1])
def test_umap_is_compiled_where_that_is_quicker(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Mapper:
        def __init__(self, **asked: object) -> None:
            seen.append(os.environ.get("NUMBA_DISABLE_JIT"))

        def fit_transform(self, keys: np.ndarray) -> np.ndarray:
            return keys[:, :2]

    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Mapper))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    assert umapjob.fit(np.zeros((spans, 4)), 5).shape == (spans, 2)
    assert seen == ["1" if spans <= umapjob.INTERPRETED else "0"]


@pytest.mark.parametrize(
    ("spans", "neighbors", "sentence"),
    [
        (8, 5, "UMAP needs at least 15"),
        (24, 60, "60 neighbours cannot be had of"),
        (24, 1, "1 neighbours cannot be had of"),
    ],
)
def test_umap_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spans: int, neighbors: int, sentence: str
) -> None:
    uid = write_synthetic(tmp_path, 1, 2, 1, 3, spans, prompt_tokens=300)
    out = tmp_path / "map.json"
    assert umapjob.main([str(tmp_path), uid, "0", "0", str(neighbors), str(out)]) == 1
    assert sentence in json.loads(capsys.readouterr().out.splitlines()[-1])["message"]
    assert not out.exists()


def test_umap_of_a_run_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert umapjob.main([str(tmp_path), "20260101-000000-none", "0", "0", "5", str(tmp_path / "m.json")]) == 1
    assert "is no run 20260101-000000-none" in json.loads(capsys.readouterr().out.splitlines()[-1])["message"]


def test_a_stored_map_of_other_spans_or_settings_is_not_taken(tmp_path: Path) -> None:
    path, spans = tmp_path / "m.json", np.arange(3)
    wanted = umapjob.settings(0, 1, 2)
    path.write_text(json.dumps({**wanted, "spans": [0, 1, 2], "points": [[0, 1], [2, 3], [4, 5]]}))
    assert spansmap.load_map(path, spans, wanted) is not None
    assert spansmap.load_map(path, spans[:2], wanted) is None
    assert spansmap.load_map(path, spans, umapjob.settings(0, 1, 3)) is None
    for broken in ("", "[]", "{}", json.dumps({**wanted, "spans": [0, 1, 2], "points": [[0, 1]]})):
        path.write_text(broken)
        assert spansmap.load_map(path, spans, wanted) is None
    assert spansmap.load_map(tmp_path / "none.json", spans, wanted) is None

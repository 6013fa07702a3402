"""The figure of `kvlens bench explain`: every recorded share in its cell, what was not run as n/r."""

from __future__ import annotations

from kvlens.app.figures.explain import LABELS, restored, table
from kvlens.lab.results.explain_table import ARMS

SHARE = {"share": 0.96, "low": 0.86, "high": 0.99, "n": 50}


def test_every_arm_has_a_column_and_its_share_in_words() -> None:
    assert set(LABELS) == set(ARMS)
    lines = [
        {
            "method": "chess",
            "task": "multikey",
            "budget": "10%",
            "arms": dict.fromkeys(ARMS, SHARE) | {"random1": SHARE | {"share": 0.0}},
        },
        {"method": "new", "task": "list", "budget": "5%", "arms": {"everywhere": SHARE}},
        {"method": "none", "task": "list", "budget": "5%", "arms": {}},
    ]
    frame = table(lines)
    assert len(frame) == len(ARMS) + 1
    figure = restored(frame, {"chess": "CHESS"})
    heat, *inks = figure.data
    words = {(x, y): text for ink in inks for x, y, text in zip(ink.x, ink.y, ink.text, strict=True)}
    assert len(words) == 2 * len(LABELS)
    assert list(heat.y) == ["CHESS, multikey 10%", "new, list 5%"]
    assert words[LABELS["random1"], "CHESS, multikey 10%"] == "0.00"
    assert words[LABELS["everywhere"], "new, list 5%"] == "0.96"
    assert heat.z[0][list(LABELS).index("steps_top5")] == 0.96
    assert all(words[LABELS[arm], "new, list 5%"] == "n/r" for arm in ARMS if arm != "everywhere")
    assert heat.z[1][0] is None
    assert (heat.zmin, heat.zmax) == (0, 1)
    older = frame[~frame["held"].str.startswith("effect")]
    assert [label for label in restored(older, {}).data[0].x if "effect" in label] == [], "not measured: no column"
    assert "0.86 to 0.99" in heat.customdata[0][-1]

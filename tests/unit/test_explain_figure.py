"""The figure of `kvlens bench explain`: every recorded share in its cell, what was not run as n/r."""

from __future__ import annotations

from kvlens.bench.explaintable import ARMS
from kvlens.figures.explain import LABELS, restored, table

SHARE = {"share": 0.96, "low": 0.86, "high": 0.99, "n": 50}


def test_every_arm_has_a_column_and_its_share_in_words() -> None:
    assert set(LABELS) == set(ARMS)
    lines = [
        {"method": "chess", "task": "multikey", "budget": "10%", "arms": dict.fromkeys(ARMS, SHARE) | {"random1": SHARE | {"share": 0.0}}},
        {"method": "new", "task": "list", "budget": "5%", "arms": {"everywhere": SHARE}},
        {"method": "none", "task": "list", "budget": "5%", "arms": {}},
    ]
    frame = table(lines)
    assert len(frame) == len(ARMS) + 1
    figure = restored(frame, {"chess": "CHESS"})
    (heat,) = figure.data
    assert list(heat.y) == ["CHESS, multikey 10%", "new, list 5%"]
    assert heat.text[0][list(LABELS).index("random1")] == "0.00"
    assert heat.z[0][list(LABELS).index("steps_top5")] == 0.96
    assert list(heat.text[1])[:-1] == ["n/r"] * (len(LABELS) - 1)
    assert heat.z[1][0] is None
    assert (heat.zmin, heat.zmax) == (0, 1)
    assert "0.86 to 0.99" in heat.customdata[0][-1]

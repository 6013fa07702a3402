"""Home groups what was lost by cause, when it is asked to."""

from __future__ import annotations

from pathlib import Path

from lensruns import write_lens_runs
from test_pages import words
from uiruns import Visit

from kvlens.lens.diagnosis import Wanted, diagnose
from kvlens.lens.reasons import KINDS


def test_losses_are_grouped_when_asked_for(visit: Visit, tmp_path: Path) -> None:
    made = write_lens_runs(tmp_path)
    app = visit(tmp_path)
    assert "compared with full KV" not in words(app)
    app.toggle(key="runs_causes").set_value(True).run()
    assert not app.exception
    text = words(app).replace("\\", "")
    assert "3 runs compared with full KV, 2 lost." in text
    found = diagnose(tmp_path, Wanted())
    for cause in found.causes:
        assert KINDS[cause.kind][1:] in text
        for (layer, head), n in cause.heads[:4]:
            assert f"L{layer} KV{head} ({n} of {len(cause.lost)})" in text
    linked = {link.proto.query_string for link in app.get("page_link") if link.proto.query_string}
    assert any(made.lost in query for query in linked)
    assert any(made.repeated in query for query in linked)

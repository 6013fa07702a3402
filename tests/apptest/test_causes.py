"""Home groups what was lost by cause, when it is asked to."""

from __future__ import annotations

import re
from pathlib import Path

from lensruns import write_lens_runs
from test_pages import words
from uiruns import Visit

from kvlens.lens.diagnosis import Wanted, diagnose
from kvlens.lens.reasonkinds import KINDS
from tests.synthetic import write_synthetic


def test_losses_are_grouped_when_asked_for(visit: Visit, tmp_path: Path) -> None:
    made = write_lens_runs(tmp_path)
    of_tokens = {"method": "quest", "config": {"keep": 0.0, "tokens": 96}, "budget": "1.0", "budget_bytes": None}
    write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, prompt_tokens=200, reference=made.full, **of_tokens)
    known = {"answer": "58214", "output_text": "9999", "reference_output": "1951", "prompt_tokens": 200}
    mild = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, **known)  # type: ignore[arg-type]
    app = visit(tmp_path)
    assert "compared with full KV" not in words(app)
    app.toggle(key="runs_causes").set_value(True).run()
    assert not app.exception
    text = words(app).replace("\\", "")
    assert re.search(r"\b5 runs .* 3 lost;", text)
    assert sorted(re.findall(r"(\d) lost on synthetic at (\S+)", text)) == [("1", "96"), ("2", "35%")]
    found = diagnose(tmp_path, Wanted())
    for cause in found.causes:
        assert KINDS[cause.kind][1:] in text
        for (layer, head), n in cause.heads[:4]:
            assert f"L{layer} KV{head} ({n} of {len(cause.lost)})" in text
    assert "; 1 more diverged" in text
    linked = {link.proto.query_string for link in app.get("page_link") if link.proto.query_string}
    assert any(made.lost in query for query in linked)
    assert any(made.repeated in query for query in linked)
    assert not any(mild in query for query in linked)

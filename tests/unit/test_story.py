"""What README tells of the sample run is what `python -m benchmarks.story` read on the page."""

from __future__ import annotations

import json
from pathlib import Path

from kvlens.tasks.sample import ANSWER

ROOT = Path(__file__).resolve().parents[2]


def test_readme_quotes_the_story_as_it_was_measured() -> None:
    story = json.loads((ROOT / "kvlens/lab/results/story.json").read_text(encoding="utf-8"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\n>", " ").split())
    verdict, tried = (
        " ".join(story[name].replace("“", '"').replace("”", '"').split()) for name in ("verdict", "tried")
    )
    for quoted in (
        'full KV says "3", this run "."',
        "KL 3.25 nats",
        "15 of its 16 tokens were evicted at the end of prefill, the best of them",
        "rank 264 of 938 by the method's score",
        "121 kept",
    ):
        assert quoted in readme, quoted
        assert quoted in verdict, quoted
    assert story["masses"] in readme
    assert f"it says 4821 for {ANSWER}" in readme
    assert "Answer before: 4821. " in tried
    assert f"Answer with it held: {ANSWER}." in tried
    assert "737 kB, 1.57 % of full KV" in readme
    assert "737 kB" in tried
    assert "1.57% of full KV" in tried
    assert story["restored"] == "yes"

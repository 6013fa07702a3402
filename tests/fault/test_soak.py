"""The soak of reliability.md in short: kills, damage and hostile files, none of which may lose, hang or crash."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from benchmarks.soak import PARTS, bad, with_sitting
from benchmarks.soakfiles import DAMAGES

ROOT = Path(__file__).parents[2]
CODE = "from benchmarks.soak import bad, soak; found, _ = soak(10, short=True); print(found); assert not bad(found)"


def test_nothing_is_lost_hangs_or_crashes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = ast.literal_eval(done.stdout)
    counts = {label: sum(outcomes.values()) for label, outcomes in found.items()}
    assert counts == {
        "kills: writer": PARTS["writer"].short,
        "kills: recover": PARTS["recover"].short,
        "kills: delete": PARTS["delete"].short,
        **{f"damage: {kind}": 1 for kind in DAMAGES},
        "foreign traces, read": PARTS["traces"].short // 2,
        "foreign traces, recover": PARTS["traces"].short // 2,
        "prompt files": PARTS["prompts"].short,
    }


def test_sittings_add_up_and_go_on_where_the_last_one_ended() -> None:
    first = {"minutes": 1.0, "attempts": {"writer": 3, "memory": 0}, "outcomes": {"kills: writer": {"kept": 3}}}
    second = {
        "minutes": 2.0,
        "attempts": {"writer": 2, "memory": 1},
        "outcomes": {"kills: writer": {"kept": 1, "lost": 1}, "memory": {"flat": 1}},
    }
    both = with_sitting(with_sitting({}, first), second)
    assert both["attempts"] == {"writer": 5, "memory": 1}
    assert (both["minutes"], both["sittings"]) == (3.0, [first, second])
    assert both["outcomes"] == {"kills: writer": {"kept": 4, "lost": 1}, "memory": {"flat": 1}}
    assert bad(both["outcomes"]) == {"kills: writer": {"lost": 1}}


def test_a_part_that_has_all_it_wants_leaves_its_time_to_the_others() -> None:
    wanted = {name: part.wanted for name, part in PARTS.items()} | {"prompts": 3}
    code = f"from benchmarks.soak import soak; print(soak(0.3, short=False, earlier_attempts={wanted}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found, made = ast.literal_eval(done.stdout.splitlines()[-1])
    left = PARTS["prompts"].wanted - 3
    assert found == {"prompt files": {"refused": left}}
    assert made == dict.fromkeys(PARTS, 0) | {"prompts": left}

"""`kvlens gallery`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import kvlens

from kvlens.app import gallery
from kvlens.store.reader import list_runs


def test_the_losses_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    kvlens("gallery", "--json")
    told = json.loads(capsys.readouterr().out)
    assert [loss["uid"] for loss in told["losses"]] == [loss.uid for loss in gallery.losses()]
    assert told["about"]["date"]
    kvlens("gallery")
    listed = capsys.readouterr().out
    assert all(loss.method in listed for loss in gallery.losses())


def test_a_loss_is_put_among_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = gallery.losses()[-1]
    kvlens("gallery", loss.method, "--runs", str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == loss.uid
    assert set(list_runs(tmp_path)["uid"]) == {loss.uid, loss.held.uid}
    kvlens("runs", "show", loss.uid, "--runs", str(tmp_path), "--json")
    shown = json.loads(capsys.readouterr().out)
    assert (shown["outcome"], shown["left_full_kv_at_step"]) == (
        "wrong answer",
        int(loss.verdict.split()[3].rstrip(":")),
    )


def test_a_method_without_a_loss_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kvlens("gallery", "full", "--runs", str(tmp_path))
    said = " ".join(capsys.readouterr().err.split())
    assert "no loss of 'full'" in said

"""A ledger that `Run.ledger` keeps beside its run."""

from __future__ import annotations

import errno
import warnings

import pytest

import kvlens
from kvlens.ledger.storage import FILE


def test_a_ledger_that_cannot_be_stored_is_returned(lost: kvlens.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("kvlens.ledger.storage.replace_plain", refuse)
        with pytest.warns(UserWarning, match=lost.uid):
            ledger = lost.ledger(progress=False)
    assert not (lost.folder / lost.uid / FILE).exists()
    assert ledger.lost > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lost.ledger(progress=False).lost == pytest.approx(ledger.lost)
    assert (lost.folder / lost.uid / FILE).exists()

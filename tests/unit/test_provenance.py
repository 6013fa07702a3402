"""What a result says of the machines that made its trials."""

from __future__ import annotations

from kvlens.lab.bench.provenance import made_elsewhere

MADE = {"torch": "8", "date": "2030-01-02", "machine": {"processor": "P", "cores": 3}}


def test_trials_are_counted_by_machine_and_the_newest_names_versions() -> None:
    on_gpu = MADE | {"machine": {"processor": "P", "cores": 3, "gpu": "G"}, "date": "2030-01-01"}
    found = made_elsewhere([{"made": MADE}, {"made": on_gpu}, {"made": on_gpu}, {"index": 4}])
    counts = {"P, 3 cores, torch 8": 1, "G, torch 8": 2, "not recorded": 1}
    assert found == MADE | {"trials_by_device": counts}


def test_nothing_is_said_where_no_trial_records_its_machine() -> None:
    assert made_elsewhere([{"index": 4}]) == {}

"""One layer of a step passes few files: the count that docs/architecture.md describes does not grow unseen."""

from __future__ import annotations

from kvlens.lab.studies.passage import measure


def test_a_layer_of_snapkv_passes_few_files() -> None:
    layer, whole = measure("snapkv")
    assert {"kvlens/engine/session.py", "kvlens/memory/reads.py", "kernels/attend.py"} <= layer.files <= whole.files
    assert len(layer.files) <= 12
    assert 0 < layer.hops <= 20

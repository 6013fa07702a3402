"""The list of mutations: each can be made in the sources as they are, and names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations import Mutation, copied, mutations

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.says)
def test_a_mutation_changes_one_place_of_a_source(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.says)
def test_the_tests_of_a_mutation_exist(mutation: Mutation) -> None:
    assert mutation.tests
    for test in mutation.tests:
        file, _, case = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not case or f"def {case.partition('[')[0]}(" in text


def test_the_sentence_of_a_mutation_is_its_name() -> None:
    sentences = [mutation.says for mutation in mutations()]
    assert len(set(sentences)) == len(sentences)


def test_a_change_in_a_copy_is_a_change_of_what_tests_import(tmp_path: Path) -> None:
    tree = copied(ROOT, tmp_path / "copy")
    for file in ("store/blocks.py", "kernels/attend.py"):
        (tree / file).write_text("changed = True")
        assert (tree / "kvlens" / file).read_text() == "changed = True"

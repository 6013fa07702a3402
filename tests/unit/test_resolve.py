"""The check of what requirements resolve to, on wheels made here: no index is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from resolve import PYTHONS, ROOT, Case, Unresolved, cases, resolve, write_wheel


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A `torch` that depends on one `triton` in its plain build and on none in its CPU build, and three of `triton`."""
    write_wheel(tmp_path, "torch", "2.0", ['triton==3.7.1; sys_platform == "linux"'])
    write_wheel(tmp_path, "torch", "2.0+cpu")
    for version in ("3.6.0", "3.7.1", "3.9.0"):
        write_wheel(tmp_path, "triton", version)
    return tmp_path


def case(wheels: Path, asks: str, *pins: str, python: str = "3.12", needs: bool = True) -> Case:
    file = wheels / "requirements.txt"
    file.write_text(asks)
    return Case("test", file, python, pins, wheels, needs)


def test_torch_chooses_its_triton_where_it_brings_one(wheels: Path) -> None:
    asks = "torch==2.0\ntriton>=3.6,<4\n"
    plain = resolve(case(wheels, asks, "torch===2.0"), "--no-index")
    cpu = resolve(case(wheels, asks, "torch===2.0+cpu"), "--no-index")
    assert plain == {"torch": "2.0", "triton": "3.7.1"}
    assert cpu == {"torch": "2.0+cpu", "triton": "3.9.0"}


def test_another_triton_than_torchs_has_no_solution(wheels: Path) -> None:
    asks = "torch==2.0\ntriton==3.9.0\n"
    assert resolve(case(wheels, asks, "torch===2.0+cpu"), "--no-index")["triton"] == "3.9.0"
    with pytest.raises(Unresolved, match="depends on triton"):
        resolve(case(wheels, asks, "torch===2.0"), "--no-index")


def test_markers_are_those_of_the_python_asked_for(wheels: Path) -> None:
    asks = 'triton==3.6.0; python_version < "3.13"\ntriton==3.9.0; python_version >= "3.13"\n'
    found = [resolve(case(wheels, asks, python=python), "--no-index")["triton"] for python in PYTHONS]
    assert found == ["3.6.0", "3.6.0", "3.9.0"]


def test_what_is_not_on_the_index_is_told_apart_from_no_needs(wheels: Path) -> None:
    write_wheel(wheels, "model", "1.0", ["nowhere"])
    assert resolve(case(wheels, "model\n", needs=False), "--no-index") == {"model": "1.0"}
    with pytest.raises(Unresolved, match="nowhere"):
        resolve(case(wheels, "model\n"), "--no-index")


def test_an_index_that_cannot_be_reached_is_a_failure(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(Unresolved, match=r"Failed to fetch"):
        resolve(case(wheels, "somewhere-else\n"))


def test_every_python_is_asked_for_both_builds_and_the_model(tmp_path: Path) -> None:
    made = list(cases(tmp_path))
    assert [each.python for each in made] == [python for python in PYTHONS for _ in range(3)]
    assert f">={PYTHONS[0]}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for plain, cpu, model in zip(*[iter(made)] * 3, strict=True):
        assert plain.pins[0] + "+cpu" == cpu.pins[0]
        assert (plain.wheels, cpu.wheels) == (None, tmp_path)
        assert not model.needs
    assert len(list(tmp_path.iterdir())) == 1

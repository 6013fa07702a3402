"""Which full attention is recorded: the option's text, and what is taken by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import one_sentence
from support import raises_code

from kvlens.recording.sampling import AUTO_NUMBERS, OracleSampling, check, resolve


@given(every=st.integers(1, 999_999), layers=st.sets(st.integers(0, 255), min_size=1), swap=st.booleans())
def test_what_is_written_is_what_is_read(every: int, layers: set[int], swap: bool) -> None:
    parts = [f"every={every}", f"layers={'+'.join(str(layer) for layer in layers)}"]
    found = resolve(",".join(parts[::-1] if swap else parts), 256, 8, 1000)
    assert found == OracleSampling(every, tuple(sorted(layers)))
    assert (found.meta().every, found.meta().layers) == (every, tuple(sorted(layers)))


@given(first=st.integers(0, 255), length=st.integers(0, 255), more=st.integers(0, 255))
def test_ranges_hold_both_ends(first: int, length: int, more: int) -> None:
    last = min(first + length, 255)
    found = resolve(f"layers={first}-{last}+{more}", 256, 8, 1000)
    assert found is not None
    assert set(found.layers) == {*range(first, last + 1), more}
    assert found.every == 1


@given(text=st.text(max_size=30) | st.text("every=layrs,+-0123456789", max_size=30))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    try:
        check(text)
    except ValueError as error:
        one_sentence(error)
        return
    try:
        found = resolve(text, 1000, 8, 100)
    except ValueError:
        pytest.fail("check lets through what resolve refuses")
    assert found is None or (
        found.every >= 1 and list(found.layers) == sorted(set(found.layers)) and len(found.layers) <= 1000
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on",
        "AUTO",
        "every=0",
        "every=-1",
        "every=",
        "layers=",
        "layers=3-1",
        "every=2,every=3",
        "every=2;layers=1",
        "layers=1,2",
        "steps=4",
    ],
)
def test_wrong_text_is_refused(text: str) -> None:
    with raises_code("bad_value", name="oracle", value=text):
        check(text)


@given(layers=st.integers(1, 128), q_heads=st.integers(1, 128), tokens=st.integers(1, 200_000))
def test_auto_takes_all_it_may_and_no_more(layers: int, q_heads: int, tokens: int) -> None:
    found = resolve("auto", layers, q_heads, tokens)
    assert found is not None
    assert found.layers == tuple(range(layers))
    numbers = layers * q_heads * tokens
    assert numbers <= AUTO_NUMBERS * found.every
    assert found.every == 1 or numbers > AUTO_NUMBERS * (found.every - 1)


def test_the_words() -> None:
    assert resolve("off", 4, 8, 100) is None
    assert resolve("off", 4, 8, 100, coverage=False) is None
    assert resolve("auto", 4, 8, 100, coverage=False) is None
    assert resolve("all", 4, 8, 10**9) == OracleSampling(1, (0, 1, 2, 3))
    with raises_code("coverage_missing"):
        resolve("all", 4, 8, 100, coverage=False)
    with raises_code("bad_value", name="oracle", value="layers=1+4"):
        resolve("layers=1+4", 4, 8, 100)


@given(every=st.integers(1, 9), step=st.integers(0, 100))
def test_steps_between_are_skipped(every: int, step: int) -> None:
    assert OracleSampling(every, (1, 2)).choose_layers(step) == ((1, 2) if step % every == 0 else ())

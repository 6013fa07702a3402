"""Names and texts that a package gives its method: what a list, a page or a file name could not hold is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support import raises_code

from kvlens import methods
from kvlens.methods.classfaults import find_lack, name_fault
from kvlens.methods.snapkv import SnapKV
from kvlens.plugins import CODE, LONGEST_NAME, plugins

LONG = "x" * 10_000


def made(**fields: Any) -> type[SnapKV]:
    """A method like SnapKV with other names."""
    return type("Foreign", (SnapKV,), {"name": "foreign", "title": "Foreign", **fields})


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a/b",
        "<b>bold</b>",
        "[link](http://evil.example)",
        "x" * 65,
        "",
        "two\nlines",
        "red\x1b[31m",
        "\u202eright",
        ".",
        "-f",
        7,
    ],
)
def test_a_name_that_is_no_plain_word_is_refused(name: Any) -> None:
    with raises_code("no_method"):
        methods.register(made(name=name))
    assert name not in methods.registry()


@pytest.mark.parametrize("field", ["title", "summary", "paper"])
@pytest.mark.parametrize("text", [LONG, "two\nlines", "red\x1b[31m", "\u202eright to left", None])
def test_texts_that_are_not_one_printable_line_are_refused(field: str, text: Any) -> None:
    with raises_code("no_method") as refused:
        methods.register(made(**{field: text}))
    assert f" {field} " in str(refused.value)


def test_every_method_of_the_product_has_plain_names() -> None:
    assert [name for name, method in methods.registry().items() if name_fault(method) or find_lack(method)] == []


def test_a_refused_plugin_is_named_in_one_short_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from kvlens import plugins as module

    point = EntryPoint("red\x1b[31m\n" + LONG, "no_such_module_of_any_package:" + LONG, "kvlens.methods")
    monkeypatch.setattr(module, "entry_points", lambda group: [point])
    loaded, refused = plugins("method", ())
    (name,), (sentence,) = refused.keys(), refused.values()
    assert loaded == {}
    assert sentence.startswith(CODE)
    assert sentence.isprintable()
    assert len(name) <= LONGEST_NAME + 20
    assert len(sentence) <= 600

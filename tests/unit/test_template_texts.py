"""The study of published chat templates: what equals transformers' text, what is refused, and the page of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvlens.lab.studies.template_texts import BOTH, DIFFERENT, EQUAL, REFUSED, SPECIALS, compare, main, templates
from kvlens.text.chat import Template

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMS = PLAIN.replace("m.content", "m.content | trim")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
CHANGES = PLAIN.replace("m.content", "m.content | replace('\\n\\n', '\\n')")


@pytest.mark.parametrize(
    ("text", "system", "verdict"),
    [
        (PLAIN, None, EQUAL),
        (TRIMS, "Be brief.", EQUAL),
        (NO_SYSTEM, None, EQUAL),
        (NO_SYSTEM, "Be brief.", BOTH),
        (CHANGES, None, REFUSED),
    ],
)
def test_a_template_is_equal_or_refused(text: str, system: str | None, verdict: str) -> None:
    assert compare(Template(text, SPECIALS), system, ()).verdict == verdict


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kvlens fed another text, the study would say so."""
    monkeypatch.setattr("kvlens.lab.studies.template_texts.reference", lambda *_: "another text")
    assert compare(Template(PLAIN, SPECIALS), None, ()).verdict == DIFFERENT


def test_templates_come_once_from_tokenizers_and_files(tmp_path: Path) -> None:
    model, files = tmp_path / "model", tmp_path / "files"
    model.mkdir()
    files.mkdir()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN, "bos_token": "<b>"}))
    (files / "same.jinja").write_text(PLAIN)
    (files / "trims.jinja").write_text(TRIMS)
    found = dict(templates([tmp_path]))
    assert list(found) == ["model", "files/trims.jinja"]
    assert found["model"].specials == {"bos_token": "<b>"}
    main([str(tmp_path), "--write", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| one turn | 2 | 0 | 0 | 0 | 2 |" in page
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", page)
    assert PLAIN not in page, "templates of others are not copied"

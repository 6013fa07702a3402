"""README.md: what runs elsewhere has its file, links lead somewhere, figures are the committed ones. Its commands
and code run in test_readme_runs.py."""

from __future__ import annotations

import json
import re
import subprocess

from readmetext import ELSEWHERE, README, ROOT, inline_commands, make_targets, python_blocks, shell_lines

from kvlens import methods


def test_the_method_of_the_readme_has_fifteen_lines_at_most() -> None:
    lines = python_blocks()[1].splitlines()
    assert len([line for line in lines if line]) <= 15


def test_what_runs_elsewhere_has_its_file_and_its_target() -> None:
    lines = shell_lines()
    assert set(ELSEWHERE) <= set(lines)
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []
    targets = {line.split()[1] for line in [*lines, *inline_commands()] if line.startswith("make ")}
    assert targets <= make_targets()
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    recipe = subprocess.run(["make", "-n", "app"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].endswith("streamlit run app.py")


def test_the_page_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 160
    assert text.index("![") < text.index("```")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_restored_answers_is_of_the_committed_figures() -> None:
    file = ROOT / "kvlens/lab/results/explain-smollm2-kinds-10.json"
    measured = json.loads(file.read_text(encoding="utf-8"))
    every = measured["pooled"]["all"]
    groups = {methods.get(line["method"]).title: line for line in measured["lines"]} | {"all": every}
    restored = {
        name: [round(group["arms"][f"shown_top{top}"]["share"] * group["n"]) for top in (5, 20)] + [group["n"]]
        for name, group in groups.items()
    }
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| restored |"))
    names, cells = ([cell.strip() for cell in lines[place].split("|")[2:-1]] for place in (start, start + 2))
    figures = [[int(number) for number in re.findall(r"\d+", cell)] for cell in cells]
    assert dict(zip(names, figures, strict=True)) == restored
    assert measured["about"]["masses"] == "full KV"
    assert every["arms"]["random5"]["share"] == 0

"""Names that a request may hold: of methods and tasks, refused with the known ones where there is none of that name;
of tables, and of what was measured when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator

from kvlens import methods, tasks
from kvlens.methods.naming import preset_name


def _methods(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        methods.get(name)
    return names


def _tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        tasks.get(name)
    return names


def measured_on(about: dict[str, Any]) -> str:
    """'2026-01-01 (one method's rows 2026-01-02)': the date of a result, and of the rows that were made again since
    (`remade`: method -> date) or on which other budgets or points were measured (`sittings`: date -> what)."""
    dates: dict[str, list[str]] = {}
    for name, date in (about.get("remade") or {}).items():
        dates.setdefault(date, []).append(methods.get(name).title)
    sentences = [f"{', '.join(titles)}'s rows {date}" for date, titles in dates.items()]
    later = [date for date in about.get("sittings") or {} if date != about["date"]]
    sentences += [f"{', '.join(about['sittings'][date])}: {date}" for date in later]
    return f"{about['date']} ({'; '.join(sentences)})" if sentences else str(about["date"])


def limit_words(budget: str, rules: Iterable[str | None]) -> str:
    """Return what a row was held to, of the rules of its tasks: '20%', '20% of attended tokens', or 'none'."""
    held_by = set(rules)
    if "attended tokens" in held_by:
        return f"{budget} of attended tokens"
    return "none" if held_by == {"none"} else budget


def table_name(method: str, presets: Iterable[str | None], usual: str | None = None) -> str:
    """Return what tables call a method that ran with these presets, as results record them: 'defaults' and None are no
    preset. usual: the preset that was asked for, whose trained parts `fit` takes. The untrained parts are included;
    names that differ are joined by 'or'."""
    names = [preset_name(method, None if preset == "defaults" else preset, usual=usual) for preset in presets]
    return " or ".join(dict.fromkeys(names)) or methods.get(method).title


MethodNames = Annotated[tuple[str, ...], AfterValidator(_methods)]
TaskNames = Annotated[tuple[str, ...], AfterValidator(_tasks)]


def name_methods(request: dict[str, Any]) -> str:
    """Return what tells a table from one of other methods: the first of its methods."""
    names = request.get("methods") or ("full",)
    return f"methods from {table_name(names[0], [None])} on"

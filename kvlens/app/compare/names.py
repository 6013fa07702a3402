"""What runs are called beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlens.lens.knob import held_to
from kvlens.lens.runsettings import settings_by
from kvlens.methods import naming
from kvlens.methods.differences import tell_apart
from kvlens.store.reader import TraceReader


def run_name(reader: TraceReader) -> str:
    """A run in a few words: method, preset, budget, forced, held."""
    meta = reader.meta
    parts = [naming.code_name(meta)]
    parts += [f"({meta.preset})"] if meta.preset else []
    parts += [held_to(meta)]
    return " ".join([*parts, *_list_changes(reader)])


def short_names(runs: Sequence[TraceReader]) -> list[str]:
    """Each run by what its method is called, the settings that differ among runs of that name, and as much more as
    tells it from the others: preset, model, the end of its uid. That it was fed another's tokens, or that ranges were
    held, is always said. No two are alike."""
    names = [" ".join([naming.run_name(run.meta), *_list_changes(run)]) for run in runs]
    differences = tell_apart(names, [settings_by(run.outcome_facts()) for run in runs])
    names = [f"{name} {words}".rstrip() for name, words in zip(names, differences, strict=True)]
    for more in _MORE:
        words = [more(run) for run in runs]
        words_by_name = {
            name: {word for other_name, word in zip(names, words, strict=True) if other_name == name} for name in names
        }
        names = [
            f"{name} {word}".rstrip() if len(words_by_name[name]) > 1 else name
            for name, word in zip(names, words, strict=True)
        ]
    return names


def _list_changes(reader: TraceReader) -> list[str]:
    return (["forced"] if reader.meta.forced else []) + (
        (["with held ranges"] if reader.meta.hold else []) + (["with dropped ranges"] if reader.meta.drop else [])
    )


_MORE: tuple[Callable[[TraceReader], str], ...] = (
    lambda run: f"({run.meta.preset})" if run.meta.preset else "",
    lambda run: str(run.meta.model).rstrip("/").rpartition("/")[2],
    lambda run: f"…{run.uid.rpartition('-')[2]}",
    lambda run: run.uid,
)

"""`kvlens.race`: one prompt under several methods at one budget."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from kvlens import methods as registry
from kvlens.api.asking import BudgetLike, Settings, budget_text, folder_of, listed, method_name, request_of
from kvlens.api.carrying import carrying
from kvlens.api.columns import described
from kvlens.api.errors import Interrupted, RequestError, translated
from kvlens.api.keywordtypes import check_mappings
from kvlens.api.models import Given, Named, source_of
from kvlens.api.prompts import PromptLike
from kvlens.api.storedrun import Run
from kvlens.budget import in_words, phrase
from kvlens.methods.base import Method
from kvlens.methods.naming import titled
from kvlens.runs.request import DEFAULT_SHARE
from kvlens.text.plaintext import visible

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.runs.races import Lane, RaceInfo


class Race(Sequence[Run]):
    """The runs of a race, full KV first; methods that were refused have none. `table()` lists all lanes."""

    def __init__(self, folder: Path, info: RaceInfo, models: Named | Given, progress: bool = True) -> None:
        self.folder = folder
        self.id = info.id
        """names the race, in the folder's `races`"""
        self.info = info
        """what is stored of it (kvlens.runs.races)"""
        self.runs = [Run(folder, lane.uid, models, progress) for lane in info.lanes if lane.uid is not None]

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, place: int) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> list[Run]: ...
    def __getitem__(self, place: int | slice) -> Run | list[Run]:
        return self.runs[place]

    def table(self) -> pd.DataFrame:
        """Return one row per lane, full KV first; columns: docs/api.md."""
        import pandas as pd

        rows = [
            {
                "method": lane.method,
                "stand_in": lane.stand_in,
                "differs": lane.differs,
                "preset": lane.preset,
                "state": lane.state,
                "right": lane.right,
                "lost_at_step": lane.lost,
                "output": lane.text,
                "note": lane.message or lane.note,
                "uid": lane.uid,
            }
            for lane in self.info.lanes
        ]
        frame = pd.DataFrame(rows)
        frame["lost_at_step"] = frame["lost_at_step"].astype("Int64")
        return described(frame, "race")

    def __repr__(self) -> str:
        names = ", ".join(map(_name, self.info.lanes))
        return f"<kvlens.Race {self.id}: {names} with {phrase(in_words(self.info.budget))}>"

    def _repr_html_(self) -> str:
        """A small table, as notebooks show it."""
        shown = {"state": "state", "right": "right", "lost": "lost at step", "text": "output"}
        head = "".join(f"<th>{words}</th>" for words in ("method", *shown.values(), "note"))
        rows = "".join(f"<tr>{_cells(lane, shown)}</tr>" for lane in self.info.lanes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def race(
    text: PromptLike,
    methods: Sequence[str | type[Method]],
    budget: BudgetLike = DEFAULT_SHARE,
    *,
    presets: Mapping[str, str | Sequence[str | None]] | None = None,
    parameters: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]] | None = None,
    answer: str | None = None,
    needle: str | None = None,
    ask: str | None = None,
    segments: Mapping[str, str | tuple[int, int]] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    runs: str | Path | None = None,
    progress: bool = True,
    **settings: Unpack[Settings],
) -> Race:
    """Run a prompt under several methods at one budget, each compared with full KV, and return the race. A method that
    cannot keep to the budget is a lane with a note; the others run.

    Args:
        text, answer, needle, ask, segments, model, tokenizer, device, dtype, runs, progress: as for `run`.
        methods: names or classes, one or several; full KV runs beside them always. A method named several times races
            against itself, with other parameters.
        budget: what every method is held to.
        presets: method -> preset, or a list with one for each time the method is named.
        parameters: method -> its parameters by name, or a list with one set for each time the method is named.
        settings: max_new, seed, ... (kvlens.api.asking.Settings).

    Raises:
        RequestError: also where every method is refused.
    """
    from kvlens.runs.race import race as carry_out
    from kvlens.runs.races import Entrant, RaceRequest

    with translated():
        check_mappings("methods to a preset or parameters", presets=presets, parameters=parameters)
        models, fields = source_of(model, tokenizer, device, dtype)
        shared, conversation = request_of(
            text,
            fields,
            method=registry.REFERENCE,
            preset=None,
            budget=budget_text(budget),
            parameters={},
            ask=ask,
            segments=segments,
            answer=answer,
            needle=needle,
            **settings,
        )
        names = list(map(method_name, listed(methods)))
        for name in {**(presets or {}), **(parameters or {})}:
            if name not in names:
                raise RequestError(
                    "foreign_parameter", f"the race sets a preset or parameter of {name}, which is none of its methods."
                )
        chosen_parameters = [_nth(parameters, names, place) for place in range(len(names))]
        for name, mapping in zip(names, chosen_parameters, strict=True):
            check_mappings("parameters to values", **{name: mapping})
        entrants = tuple(
            Entrant(method=name, preset=_nth(presets, names, place), overrides=dict(mapping or {}))
            for place, (name, mapping) in enumerate(zip(names, chosen_parameters, strict=True))
        )
        request = RaceRequest(shared=shared, entrants=entrants)
    folder = folder_of(runs)
    with carrying(models, progress) as job:
        info = carry_out(request, conversation.prompt, folder, job.progress, job.cancelled, models)
    if any(lane.state == "cancelled" for lane in info.lanes):
        raise Interrupted(f"interrupted; what was recorded is stored, see race {info.id}.", info.lanes[0].uid)
    return Race(folder, info, models, progress)


def _name(lane: Lane) -> str:
    """A lane's method, its untrained parts, and what tells it from another lane of its method."""
    return f"{titled(lane.method, lane.stand_in)} {lane.differs}".strip()


def _nth(values: Mapping[str, Any] | None, names: Sequence[str], place: int) -> Any:
    """Return what `values` says of the entrant at a place. A list has a value for each entrant of its method, in their
    order. Raises ValueError with one sentence."""
    name, value = names[place], (values or {}).get(names[place])
    if not isinstance(value, list | tuple):
        return value
    if len(value) != names.count(name):
        raise ValueError(f"{name} is named {names.count(name)} times and has {len(value)} values: give one for each.")
    return value[names[:place].count(name)]


def _cells(lane: Lane, names: Iterable[str]) -> str:
    values = [_name(lane), *(getattr(lane, name) for name in names), lane.message or lane.note]
    return "".join(f"<td>{'' if value is None else html.escape(visible(value))}</td>" for value in values)

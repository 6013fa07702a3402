"""What a person asked for, checked before any work; and where the model of a request comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvlens import methods
from kvlens.holds import Drop, Hold
from kvlens.models.find import DEMO, SMOLLM2, default_model
from kvlens.recording import sampling
from kvlens.refusal import Refusal
from kvlens.store.schema import TRACE_LEVELS
from kvlens.text.chat import CHOICES
from kvlens.text.prompts import QUESTIONS

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel


DEFAULT_SHARE = "0.2"
"""budget of methods that do not keep all KV on the device, when none is given"""
READ_AHEAD = "--read-ahead"
"""option of `kvlens run` that reads the prompt into the folder of readings, and runs nothing"""
AUTO = "auto"
"""a budget that is not given: DEFAULT_SHARE, or more where the method cannot hold the prompt in it"""


MOST_SEED = (1 << 62) - 1
"""the largest whole number of a trace"""
MOST_THREADS = 1024
"""a process that cannot start its threads is ended by their library"""
Seed = Annotated[int, Field(ge=-MOST_SEED, le=MOST_SEED)]
SMALL = 100_000_000
"""parameters below which waking a second thread costs more than it saves"""
_WORDS = {
    "trace_level": ("--trace-level", TRACE_LEVELS),
    "chat": ("--chat", CHOICES),
    "question": ("--question", QUESTIONS),
}
"""field -> its option, and the words that it takes"""


class RunRequest(BaseModel):
    """What to run. Bad values are refused here, before a model is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(default_factory=default_model)
    method: str = methods.DEFAULT
    preset: str | None = None
    budget: str | None = None
    max_new: int = Field(64, ge=1, le=100_000)
    seed: Seed = 0
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    overrides: dict[str, Any] = {}
    chat: str = "auto"
    """whether the prompt is fed in the model's chat form: auto (where it has a template), on or off"""
    system: str | None = None
    """the system message; None: the template's own"""
    turns: tuple[tuple[str, str], ...] = ()
    """earlier turns of a conversation, (role, text) each, which the chat form puts before the prompt"""
    chat_args: dict[str, Any] = {}
    """what the chat template is given besides messages, such as enable_thinking"""
    question: str = "in"
    """in: the prompt's question is read and placed with its context; after: it is fed once the context was placed"""
    carried: bool = False
    """the first turn of a conversation is read and placed, and all later tokens are fed to its cache, step by step;
    False: the whole history is read and placed anew"""
    device: str = "auto"
    dtype: str = "float32"
    prefill_chunk: int = Field(512, ge=0)
    top_k: int = Field(16, ge=1, le=256)
    trace_level: str = "spans"
    coverage: bool = True
    phases: bool = True
    """time the phases of every step, on a CPU"""
    oracle: str = "auto"
    """at which steps and layers full attention by span is recorded: auto, off, all, or every=4,layers=0-3+7"""
    forced: tuple[int, ...] | None = None
    threads: int = Field(0, ge=0, le=MOST_THREADS)
    """torch threads of the engine; 0: one for a model under SMALL parameters, torch's choice otherwise"""
    against: bool = False
    """compare every step with the full-KV reference, which is made first where it is not stored"""
    forced_reference: bool = False
    """feed the reference's tokens instead of the method's own choices; compares as well"""
    hold: tuple[Hold, ...] = ()
    """what is kept exactly for some heads, whatever the method does"""
    drop: tuple[Drop, ...] = ()
    """what some heads never attend, whatever the method does"""

    @field_validator("budget")
    @classmethod
    def _none_for_auto(cls, text: str | None) -> str | None:
        return None if text is not None and text.strip() == AUTO else text

    @field_validator("stop")
    @classmethod
    def _written_stops(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if not all(texts):
            raise ValueError("a text to stop at has at least one character, since every output contains the empty one")
        return texts

    @field_validator("oracle")
    @classmethod
    def _known_sampling(cls, text: str) -> str:
        sampling.check(text)
        return text

    @field_validator(*_WORDS)
    @classmethod
    def _known_word(cls, text: str, field: ValidationInfo) -> str:
        option, words = _WORDS[str(field.field_name)]
        if text not in words:
            raise ValueError(f"{option} takes {', '.join(words[:-1])} or {words[-1]}")
        return text

    @model_validator(mode="after")
    def _one_way_of_forcing(self) -> RunRequest:
        if self.forced is not None and (self.against or self.forced_reference):
            raise ValueError("a run is fed given tokens or compared with its reference, not both")
        return self


def default_preset(method: str, model: str) -> str | None:
    """The preset named after an embedded model ('demo'), the paper's own otherwise, where the method has them."""
    presets = methods.get(method).presets
    own = (model,) if model in (DEMO, SMOLLM2) else ()
    return next((name for name in (*own, "paper") if name in presets), None)


def default_budget(method: str) -> str:
    """No limit for methods that keep all KV on the device, DEFAULT_SHARE of full KV for the others."""
    return "1.0" if methods.get(method).keeps_all else DEFAULT_SHARE


def parse_set(items: list[str], option: str = "--set") -> dict[str, str]:
    """['alpha=2', ...] -> {'alpha': '2'}. Raises ValueError with one sentence that names the option; Refusal
    `set_twice` for a name that is given twice."""
    pairs = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name.strip():
            raise ValueError(f"{option} takes name=value, not '{item}'.")
        if name.strip() in pairs:
            raise Refusal(f"{option} sets {name.strip()} twice: give it once.", code="set_twice", name=name.strip())
        pairs[name.strip()] = value
    return pairs


def parse_chat_args(items: list[str]) -> dict[str, Any]:
    """['enable_thinking=false', ...] -> {'enable_thinking': False}: a value is JSON where it reads as JSON, else a
    text. Raises ValueError as `parse_set`."""
    arguments: dict[str, Any] = {}
    for name, value in parse_set(items, "--chat-arg").items():
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


Report = Callable[[str, int, int], None]


class ModelSource(Protocol):
    """Supplies the loaded model of a request."""

    @property
    def named(self) -> bool:
        """True: the request's model is a name with files on this machine. False: a caller handed in the object."""
        ...

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """Return the model, ready to run. Raises UnsupportedModel with one sentence."""
        ...


class ByName:
    """Loads the model of every request from the files that its name stands for."""

    named = True

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """See ModelSource."""
        from kvlens.engine.models import load

        return load(request.model, request.device, request.dtype, report)


BY_NAME: ModelSource = ByName()

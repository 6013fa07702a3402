"""Presses of an installed kvpress: a method `kvpress:NAME` ranks the prompt's tokens by the `score` of a press.

kvpress is no dependency of kvlens, and nothing of it is imported before such a method is asked for. A press can be run
when it is a scorer and nothing else: it says a number per KV head and token, from a layer's attention module, what that
was given, and the layer's keys and values; what is cut by these numbers is cut here.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.pressrequirements import distribution, missing_requirements, pip_commands
from kvlens.methods.run_inputs import Inputs, Prefilled, torch_seed

if TYPE_CHECKING:
    import torch

    from kvlens.methods.base import Method

PREFIX = "kvpress:"
RATIO = "compression_ratio"
"""the press's field that follows from kvlens's budget"""


class NoPress(ValueError):
    """A press that is not there, or that cannot be run here: one sentence."""


@dataclass(frozen=True)
class PressParameters(PromptEvictionParameters):
    """Lengths are in tokens. What a press itself takes comes beside these; names that both have are kvlens's."""

    window: int = param(0, "last prompt tokens, kept without a comparison", ours=True)
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    press: ClassVar[type]
    own: ClassVar[tuple[str, ...]]
    """names of the press's fields among these"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.build(0.0)

    def build(self, ratio: float) -> Any:
        """The press, set to remove that share of tokens. Raises ValueError with what it says of values it does not
        take."""
        try:
            return self.press(**{RATIO: ratio}, **{name: getattr(self, name) for name in self.own})
        except (AssertionError, ValueError, TypeError) as error:
            raise ValueError(f"{_reason(error)}.") from None


class Press(PromptEviction):
    """Base of the methods made here. Scores are the press's; the budget divides equally over layers and KV heads.

    Departures: a press sees the prompt without its last token, which step 0 feeds; the share it is told to remove is
    the one that leaves as many tokens as the budget holds; random numbers are drawn from the run's seed.
    """

    Parameters = PressParameters
    needs = Needs(inputs=True)
    params: PressParameters

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        import torch

        assert prompt.inputs is not None
        kept_count, n = self.tokens(None, self.total(self.params, self.context))[layer][0], prompt.keys.shape[2]
        press = self.params.build(max(0.0, 1 - (kept_count + 0.5) / n))
        arguments: dict[str, Any] = {}
        hidden = prompt.inputs.hidden[layer][None]
        if prompt.inputs.rotary is not None:
            arguments["position_embeddings"] = prompt.inputs.rotary(hidden, torch.arange(n, device=hidden.device)[None])
        keys, values = prompt.keys[layer][None], prompt.values[layer][None]
        with lent(prompt.inputs, layer) as module, torch.random.fork_rng():
            torch.manual_seed(torch_seed(self.context.seed * 1_000_003 + layer))
            try:
                score = press.score(module, hidden, keys, values, None, arguments)
            except Exception as error:
                raise NoPress(
                    f"{self.name} cannot be run here: its score needs what kvlens does not give ({_reason(error)})."
                ) from error
        if tuple(score.shape) != tuple(keys.shape[:3]) or bool(score.isnan().any()):
            raise NoPress(f"{self.name} cannot be run here: its score is not one number per KV head and token.")
        return score[0, :, :before]


@contextmanager
def lent(inputs: Inputs, layer: int) -> Iterator[Any]:
    """A layer's attention module as kvpress has it: with the model's rotary embedding as an attribute, afterwards as it
    was."""
    module = inputs.modules[layer]
    lacking = inputs.rotary is not None and not hasattr(module, "rotary_emb")
    if lacking:
        vars(module)["rotary_emb"] = inputs.rotary  # past torch's own bookkeeping: no submodule of the model changes
    try:
        yield module
    finally:
        if lacking:
            del vars(module)["rotary_emb"]


def _reason(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".") or type(error).__name__


# ------------------------------------------------------------------------------------------------------------- finding
@cache
def press_method(name: str) -> type[Method]:
    """The method `kvpress:NAME`. Raises NoPress with one sentence."""
    library, label = _library(), name.removeprefix(PREFIX)
    presses = _presses(library)
    known_names = ", ".join(sorted(listed_name for listed_name, press in presses.items() if not _lacks(press)))
    if label not in presses:
        raise NoPress(f"kvpress has no press '{label}'; those that kvlens can run: {known_names}.")
    press_class = presses[label]
    lacks = _lacks(press_class)
    if lacks:
        raise NoPress(f"{name} cannot be run: {lacks}; those that kvlens can run: {known_names}.")
    version = getattr(library, "__version__", None) or _version()
    fields = [
        (f.name, type(f.default), param(f.default, f"of {label}, as kvpress has it"))
        for f in dataclasses.fields(press_class)
        if _settable(f)
    ]
    own_fields = tuple(name for name, _, _ in fields)
    parameters = dataclasses.make_dataclass(
        f"{label}Parameters",
        fields,
        bases=(PressParameters,),
        frozen=True,
        namespace={"press": press_class, "own": own_fields},
    )
    parameters.__qualname__ = f"{label} of kvpress {version}"  # what origins of results are told apart by
    about = next(iter((inspect.getdoc(press_class) or "").splitlines()), "").rstrip(".")
    return type(
        label,
        (Press,),
        {
            "__module__": __name__,
            "__doc__": Press.__doc__,
            "name": name,
            "title": f"{label} (kvpress)",
            "paper": f"kvpress {version}: {about or label}",
            "summary": f"drops prompt tokens once, when prefill ends: each KV head keeps what {label} scores highest",
            "Parameters": parameters,
        },
    )


def _library() -> Any:
    """kvpress. Importing it wraps the attention functions that transformers knows, for presses that mask; kvlens runs
    none of them, so the functions are put back."""
    if importlib.util.find_spec("kvpress") is None:
        command = " && ".join([*pip_commands(missing_requirements()), "pip install --no-deps kvpress"])
        raise NoPress(f"kvpress is not installed: `{command}` leaves kvlens its transformers.")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions_before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        return importlib.import_module("kvpress")
    except ModuleNotFoundError as error:
        missing, module = missing_requirements(), str(error.name).partition(".")[0]
        missing += [] if module in [distribution(line).replace("-", "_") for line in missing] else [module]
        named = ", ".join(f"'{name}'" for name in missing)
        raise NoPress(f"kvpress is installed and needs {named}: `{pip_commands(missing)[0]}`.") from None
    except ImportError as error:
        raise NoPress(f"kvpress cannot be imported beside this transformers: {_reason(error)}.") from None
    finally:
        for name, function in functions_before.items():
            ALL_ATTENTION_FUNCTIONS[name] = function


def _presses(library: Any) -> dict[str, Any]:
    """Name -> class of the presses it has, its two bases left out."""
    bases = library.BasePress, library.ScorerPress
    classes = {name: press_class for name, press_class in vars(library).items() if inspect.isclass(press_class)}
    return {
        name: press_class
        for name, press_class in classes.items()
        if issubclass(press_class, bases[0]) and press_class not in bases
    }


def _version() -> str:
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _lacks(press: Any) -> str:
    """Why a press cannot be run, in a few words; empty: it can."""
    scorer = next((kind for kind in press.__mro__ if kind.__name__ == "ScorerPress"), None)
    if scorer is None or press.score is scorer.score:
        return "it is no scorer, which says a number per token"
    if press.compress is not scorer.compress:
        return "it cuts in a way of its own, not by its scores alone"
    if press.post_init_from_model is not scorer.post_init_from_model:
        return "it prepares itself from a model, for which it may ask the network"
    open_ = [f.name for f in dataclasses.fields(press) if _open(f)]
    return f"it needs {', '.join(open_)}, for which there is no usual value" if open_ else ""


def _open(f: dataclasses.Field[Any]) -> bool:
    return f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _settable(f: dataclasses.Field[Any]) -> bool:
    """A number, a switch or a text that neither the budget nor kvlens itself says."""
    reserved = {RATIO, *(field.name for field in dataclasses.fields(PressParameters))}
    return f.init and f.name not in reserved and isinstance(f.default, (bool, int, float, str))

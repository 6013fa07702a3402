"""The methods. To add one: write its file, add its line to BUILT_IN, or announce it by an entry point
`kvlens.methods`. `kvlens.methods()` lists them as a table."""

from __future__ import annotations

import dataclasses
import importlib
from difflib import get_close_matches
from functools import cache
from typing import Any

from kvlens.callpackage import callable_package
from kvlens.methods.base import FAMILIES, Method
from kvlens.methods.classfaults import find_lack, name_fault
from kvlens.methods.composition import composed, is_composed
from kvlens.methods.filenames import is_method_file
from kvlens.methods.fitting import rule_of
from kvlens.methods.kvpress import PREFIX, press_method
from kvlens.methods.parameters import FIT, MethodInfo, converted, describe, make_parameters
from kvlens.plugins import plugins
from kvlens.refusal import Refusal

BUILT_IN = {
    "full": "kvlens.methods.full:FullKV",
    "streaming_llm": "kvlens.methods.streaming_llm.method:StreamingLLM",
    "sekv": "kvlens.methods.sekv.method:SeKV",
    "chess": "kvlens.methods.chess.method:Chess",
    "freekv": "kvlens.methods.freekv.method:FreeKV",
    "sentkv": "kvlens.methods.sentkv.method:SentKVCompress",
    "compresskv": "kvlens.methods.compresskv.method:CompressKV",
    "snapkv": "kvlens.methods.snapkv:SnapKV",
    "razorattention": "kvlens.methods.razorattention:RazorAttention",
    "keydiff": "kvlens.methods.keydiff:KeyDiff",
    "pyramidkv": "kvlens.methods.pyramidkv:PyramidKV",
    "adakv": "kvlens.methods.adakv:AdaKV",
    "headkv": "kvlens.methods.headkv:HeadKV",
    "chunkkv": "kvlens.methods.chunkkv:ChunkKV",
    "cake": "kvlens.methods.cake:Cake",
    "expected_attention": "kvlens.methods.expected_attention:ExpectedAttention",
    "semanticache": "kvlens.methods.semanticache:SemantiCache",
    "h2o": "kvlens.methods.h2o:H2O",
    "tova": "kvlens.methods.tova:Tova",
    "raas": "kvlens.methods.raas:RaaS",
    "duoattention": "kvlens.methods.duoattention.method:DuoAttention",
    "quest": "kvlens.methods.quest:Quest",
    "sparq": "kvlens.methods.sparq:SparQ",
    "rocketkv": "kvlens.methods.rocketkv:RocketKV",
    "kivi": "kvlens.methods.kivi:KIVI",
    "arkvale": "kvlens.methods.arkvale:ArkVale",
    "infllm": "kvlens.methods.infllm.method:InfLLM",
    "sentencekv": "kvlens.methods.sentencekv.method:SentenceKV",
    "shadowkv": "kvlens.methods.shadowkv.method:ShadowKV",
    "clusterkv": "kvlens.methods.clusterkv:ClusterKV",
    "pqcache": "kvlens.methods.pqcache:PQCache",
    "infinigen": "kvlens.methods.infinigen:InfiniGen",
    "turboquant": "kvlens.methods.turboquant:TurboQuant",
    "layerbits": "kvlens.methods.layerbits:LayerBits",
    "qfilters": "kvlens.methods.qfilters.method:QFilters",
    "simlayerkv": "kvlens.methods.simlayerkv:SimLayerKV",
    "criticalkv": "kvlens.methods.criticalkv:CriticalKV",
    "random": "kvlens.methods.random_eviction:RandomEviction",
    "lagkv": "kvlens.methods.lagkv:LagKV",
    "curdkv": "kvlens.methods.curdkv:CurDKV",
    "compactor": "kvlens.methods.compactor:Compactor",
    "keyformer": "kvlens.methods.keyformer:Keyformer",
    "rkv": "kvlens.methods.rkv:RKV",
    "attention_matching": "kvlens.methods.attention_matching:AttentionMatching",
    "seer": "kvlens.methods.seer.method:SeerAttention",
    "loki": "kvlens.methods.loki.method:Loki",
    "tidaldecode": "kvlens.methods.tidaldecode:TidalDecode",
    "minicache": "kvlens.methods.minicache:MiniCache",
    "thinkkv": "kvlens.methods.thinkkv:ThinK",
    "scorecut": "kvlens.methods.scorecut:ScoreCut",
    "finch": "kvlens.methods.finch:Finch",
    "kvzip": "kvlens.methods.kvzip:KVzip",
    "random_decode": "kvlens.methods.random_decode:RandomDecode",
    "magicpig": "kvlens.methods.magicpig:MagicPIG",
    "retroinfer": "kvlens.methods.retroinfer:RetroInfer",
    "xkv": "kvlens.methods.xkv:XKV",
}
REFERENCE = "full"
"""what all others are compared with: all KV, all attended"""
DEFAULT = "sekv"
"""what is run when no method is named"""
ANSWERING = "no-coarse"
"""the preset with which it answers the real model's sample prompt; the published one does not (evidence/sekv.md)"""
LOSING = "snapkv"
"""what loses the answer of the real model's sample prompt, and has it back when the lost span is held"""


callable_package(__name__)


class UnknownMethod(Refusal):
    """A name that no method has. `method_is_file`: the name of a file."""


@cache
def _plugins() -> tuple[dict[str, type[Method]], dict[str, str]]:
    return plugins("method", BUILT_IN, _fault)


REPLACED = (
    "observed_queries",
    "peeks",
    "needs_surprisal",
    "watches",
    "needs_received",
    "needs_inputs",
    "reads_itself",
    "looks_ahead",
)
"""class attributes of earlier versions, each a field of Needs now: without a refusal they would be ignored"""


def _fault(name: str, loaded: Any) -> str | None:
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        return "is no kvlens.methods.base.Method"
    if (fault := name_fault(loaded) or find_lack(loaded)) is not None:
        return fault
    replaced = [attribute for attribute in REPLACED if hasattr(loaded, attribute)]
    if replaced:
        return f"declares {', '.join(replaced)}: write needs = Needs(...) instead (kvlens/methods/hooks.py)"
    if name == loaded.name and loaded.family in FAMILIES:
        describe(loaded, rule_of(loaded))  # what every list asks of it
        return None
    return (
        f"calls itself '{loaded.name}' of family '{loaded.family}': both names must be one, and the family one of "
        + ", ".join(FAMILIES)
    )


_registered: dict[str, type[Method]] = {}
"""methods of this process alone, by name"""


def register(method: type[Method]) -> None:
    """Offer a method in this process under its name, for example a class that a notebook defines; one that was
    registered under the same name before is replaced. Raises ValueError for a class that is no method, and for a name
    of the product's or a plugin's."""
    name = getattr(method, "name", "")
    fault = _fault(name, method)
    if fault is not None:
        raise Refusal(f"{method.__name__} {fault}.", code="no_method", method=method.__name__)
    if name in BUILT_IN or name in _plugins()[0]:
        raise ValueError(f"{method.__name__}: '{name}' is the name of another method; give it a name of its own.")
    _registered[name] = method
    registry.cache_clear()


@cache
def registry() -> dict[str, type[Method]]:
    """Name -> class, of the product's methods, of installed plugins by name, and of what was registered."""
    return {**{name: _built_in(name) for name in BUILT_IN}, **_plugins()[0], **_registered}


@cache
def _built_in(name: str) -> type[Method]:
    module, attribute = BUILT_IN[name].split(":")
    method: type[Method] = getattr(importlib.import_module(module), attribute)
    return method


def refused() -> dict[str, str]:
    """Name -> one sentence, of installed plugins that are no methods here, and why."""
    return _plugins()[1]


def forget() -> None:
    """Plugins are looked for again."""
    _plugins.cache_clear()
    registry.cache_clear()


def of_family(family: str) -> list[str]:
    """Names of a family's methods: the product's in their order, then plugins by name."""
    return [name for name, method in registry().items() if method.family == family]


def get(name: str) -> type[Method]:
    """The class of a method, one of the registry, a press (kvlens.methods.kvpress) or a composition of several
    (kvlens.methods.composition). Raises UnknownMethod with the nearest name, or with what is wrong with the plugin of
    that name, NoPress or NoComposition."""
    if name in BUILT_IN:
        return _built_in(name)  # the others are not imported
    methods = registry()
    if name.startswith(PREFIX):
        return press_method(name)
    if name not in methods and is_method_file(name):
        raise UnknownMethod(
            f"'{name}' is a file, and a run takes the name of a method: announce the file in a package "
            "(docs/adding-a-method.md, section 3), or run its class from Python with kvlens.run.",
            code="method_is_file",
            file=name,
        )
    if name not in methods and is_composed(name):
        return composed(name, get, tuple(methods.values()))
    if name not in methods and name in refused():
        raise UnknownMethod(refused()[name])
    if name not in methods:
        close = get_close_matches(name, methods, 1, 0.6)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownMethod(f"unknown method '{name}'; {hint}`kvlens methods` lists all.")
    return methods[name]


def catalogue() -> list[dict[str, Any]]:
    """All methods with their parameters and presets, family by family, as plain data (no torch is imported)."""
    return [entry(name) for family in FAMILIES for name in of_family(family)]


def entry(name: str) -> dict[str, Any]:
    """A method as `catalogue` has it. Raises as `get`."""
    method = get(name)
    return dataclasses.asdict(describe(method, rule_of(method)))


__all__ = [
    "ANSWERING",
    "DEFAULT",
    "FIT",
    "LOSING",
    "REFERENCE",
    "Method",
    "MethodInfo",
    "UnknownMethod",
    "catalogue",
    "converted",
    "describe",
    "entry",
    "forget",
    "get",
    "make_parameters",
    "of_family",
    "refused",
    "register",
    "registry",
]

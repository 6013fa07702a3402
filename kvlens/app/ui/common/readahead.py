"""The prompt of the form read, and answered by full KV, while a person still looks at it: a job that no list shows,
whose results the run finds (kvlens.runs.readahead). It begins where jobs are forked from a warm process
(kvlens.app.ui.common.warm), for a model and a prompt of moderate size, and when nobody waits for a run; another prompt
or run ends it."""

from __future__ import annotations

from kvlens.app.ui.common import data
from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, command
from kvlens.app.ui.common.warm import able, warm
from kvlens.models.find import files_of
from kvlens.runs.request import READ_AHEAD

MOST_TOKENS = 4096
"""of a prompt that is read before anybody asked for it"""
MOST_BYTES = 1 << 30
"""of the files of the model that reads it: a larger one would be loaded twice, and takes long to give way"""


def reads(prompt: PromptChoice, choice: MethodChoice) -> tuple[object, ...]:
    """Return what decides the reading of a prompt and the answer of full KV, the same for all methods: model, text, how
    it is fed, and how far it is answered."""
    text, answered = prompt.prompt, (choice.max_new, choice.seed) if choice.against else ()
    fed = choice.chat, choice.system, choice.question, tuple(sorted(map(repr, choice.chat_args.items())))
    return choice.model, text.text, text.answer_prefix, text.question, prompt.turns, prompt.carried, *fed, *answered


def finished_phases(prompt: PromptChoice, choice: MethodChoice) -> frozenset[str]:
    """Return the phases of the form's run that have been gone through: those of a reading that is at its end. The
    process that read keeps the model, while it is there."""
    if not manager().has_read(reads(prompt, choice)):
        return frozenset()
    loaded = ["load"] if warm.status() is not None else []
    return frozenset(["prefill", "surprisal", *loaded, *(["reference"] if choice.against else [])])


def read_ahead(prompt: PromptChoice, choice: MethodChoice, tokens: int | None) -> None:
    """Begin to read the prompt of the form, if that is worth it. tokens: of the prompt, None: not known."""
    key = reads(prompt, choice)
    if tokens is None or tokens > MOST_TOKENS or not able() or not manager().would_read(key):
        return
    if not 0 < sum(size for _, size, _ in files_of(choice.model)) <= MOST_BYTES:
        return
    file = manager().scratch("prompt.json", prompt.file_text())
    argv = [*command(file, choice, data.runs_dir().resolve()), READ_AHEAD]
    manager().submit(argv, "Reading ahead", reads=key, ahead=True)

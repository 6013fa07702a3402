"""What a trial of a study runs: its request, the tokens that it reads and is fed, and its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens import methods, tasks
from kvlens.methods.fitting import with_changes
from kvlens.models.device import settle
from kvlens.runs.preparing import Plan, Prepared, plan
from kvlens.runs.request import RunRequest
from kvlens.text.carried import has_user_turns
from kvlens.text.prompts import BadPrompt, Prompt, PromptText, tokenize

if TYPE_CHECKING:
    from kvlens.studies.plan import Arm, StudyPlan
    from kvlens.studies.promptrow import StudyPrompt


def request_of(study: StudyPlan, prompt: StudyPrompt, arm: Arm) -> RunRequest:
    """Return the run of a prompt under an arm."""
    changes: dict[str, object] = {"device": settle(study.shared.device)}
    if study.generation != "shared" and prompt.drawn:
        drawn = tasks.get(str(prompt.drawn["task"])).generation(int(prompt.drawn["index"]))
        changes |= {"max_new": drawn.new_tokens, "temperature": drawn.temperature, "top_p": drawn.top_p}
        changes |= {"seed": drawn.seed}
    if prompt.system is not None:
        changes["system"] = prompt.system
    if prompt.turns:
        changes["turns"] = prompt.turns
    changes["carried"] = study.shared.carried and has_user_turns(prompt.turns)
    return study.request(arm).model_copy(update=changes)


def tokens_of(prompt: StudyPrompt, request: RunRequest, tokenizer: Any) -> tuple[Prompt, tuple[int, ...] | None]:
    """Return the tokens that are read, and the ids that are fed behind them; None where the method chooses its own.

    A prompt and its forced text are tokenized as one text without the chat form. A token that holds the end of the
    prompt's text is read. Raises BadPrompt, BadSegment or BadTemplate with one sentence."""
    if not prompt.forced:
        form = (request.chat, request.system, request.question, None, request.turns, request.chat_args, request.carried)
        return tokenize(prompt.source, tokenizer, None, request.max_new, *form), None
    text = prompt.source.text
    whole = tokenize(PromptText(text + prompt.forced), tokenizer, None, 0, "off")
    fed = [place for place, span in enumerate(whole.offsets) if span is not None and span[0] >= len(text)]
    if not fed or fed[0] < 2:
        raise BadPrompt(f"prompt {prompt.id} needs 2 tokens to read and 1 token of forced text.", code="forced_empty")
    cut = fed[0]
    parts = {name: getattr(whole, name)[:cut] for name in ("ids", "pieces", "offsets")}
    return replace(whole, source=prompt.source, segments=(), **parts), whole.ids[cut : fed[-1] + 1]


def plan_trial(
    study: StudyPlan, arm: Arm, request: RunRequest, prepared: Prepared, forced: tuple[int, ...] | None = None
) -> Plan:
    """Return the checked plan of a trial. forced: ids that are fed. Raises ValueError as kvlens.runs.preparing.plan."""
    if forced is not None:
        request = request.model_copy(update={"max_new": len(forced)})
    planned = plan(request, prepared, forced)
    if study.generation == "cut" and forced is None:
        most = planned.options.max_new
        options = replace(planned.options, max_new=min(study.shared.max_new, most), planned=most)
        planned = replace(planned, options=options)
    return replace(planned, chosen=with_changes(methods.get(arm.method), planned.chosen, arm.changes))

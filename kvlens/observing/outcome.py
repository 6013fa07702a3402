"""What an observed generation lost against full KV, and what a hold or drop changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvlens import tasks
from kvlens.engine.comparison import Comparison, Reference
from kvlens.engine.models import LoadedModel
from kvlens.engine.options import GenerationRules
from kvlens.holds import Drop, Hold, held_bytes, tokens_of
from kvlens.instruments import Loss
from kvlens.metaparts import Counterfactual
from kvlens.observing.taken import Taken
from kvlens.runs.answerend import gives_answer
from kvlens.store.cells import integer, number
from kvlens.store.reader import TraceReader
from kvlens.text.plaintext import token_text
from kvlens.text.prompts import Prompt


@dataclass(frozen=True)
class NextToken:
    """Figures of the token that a step chose. None: the pass made no logits."""

    logprob: float | None
    entropy: float | None
    loss: Loss | None


def next_tokens(
    loaded: LoadedModel, prompt: Prompt, steps: Sequence[Taken], reference: Reference | None
) -> list[NextToken]:
    """Return the figures of every step. The rules of the model's generation_config are applied to the logits, as a
    run of kvlens applies them."""
    rules = GenerationRules(loaded.model, len(prompt.ids) + len(prompt.asked), len(steps))
    text_of = partial(token_text, loaded.tokenizer)
    comparison = None if reference is None else Comparison(reference, loaded.model.config.vocab_size, text_of)
    ids, rows = list(prompt.ids), []
    for at, step in enumerate(steps):
        if step.logits is None:
            rows.append(NextToken(None, None, None))
            comparison = comparison if at < len(prompt.asked) else None
        else:
            logits = rules.scores(step.logits.to(loaded.model.device), ids, at + 1)
            logprobs = logits.float().log_softmax(-1)
            loss = None
            if comparison is not None and at >= len(prompt.asked):
                loss = comparison.step(at, logits.float(), step.token)
            entropy = float(torch.special.entr(logprobs.exp()).sum())
            rows.append(NextToken(float(logprobs[step.token]), entropy, loss))
        ids.append(step.token)
    return rows


def conclude(
    parent: TraceReader,
    loaded: LoadedModel,
    prompt: Prompt,
    losses: Sequence[Loss | None],
    output: str,
    reference: Reference,
    holds: Sequence[Hold],
    drops: Sequence[Drop],
) -> Counterfactual:
    """Return what holding and dropping changed against the observed run that was repeated."""
    before = {integer(row.step): (bool(row.agrees), number(row.kl)) for row in parent.loss().itertuples()}
    step = next((at for at, (agrees, _) in sorted(before.items()) if not agrees), None)
    loss = None if step is None or step >= len(losses) else losses[step]
    by_answer, source = gives_answer(loaded, prompt, reference), prompt.source
    full_text = loaded.decode(reference.ids[len(prompt.asked) :])
    expected = source.answer if by_answer and source.answer is not None else full_text
    old = parent.meta.output_text or ""

    def right(text: str) -> bool:
        return tasks.is_right(source.task, expected, text, source.answers)

    was_right = right(old) if by_answer else step is None
    back = right(output) if by_answer else loss is not None and loss.agrees
    dropped = {"dropped_tokens": tokens_of(drops), "stands": back if was_right else None} if drops else {}
    return Counterfactual(
        step=step,
        kl_before=None if step is None else before[step][1],
        kl_after=None if loss is None else loss.kl,
        answer_before=old,
        answer_after=output,
        expected=expected,
        expected_from="task" if by_answer else "reference",
        restored=None if was_right else back,
        agrees_after=None if loss is None else loss.agrees,
        held_bytes=held_bytes(tuple(holds), loaded.shape),
        held_tokens=tokens_of(tuple(holds)),
        **dropped,
    )

"""docs/evidence/gallery.md quotes the gallery's losses: each between two marks that name its method."""

from __future__ import annotations

from kvlens import PACKAGE
from kvlens.app import gallery

DOC = PACKAGE.parent / "docs" / "evidence" / "gallery.md"


def quoted(loss: gallery.Loss) -> str:
    """A loss as the page quotes it, Markdown."""
    preset = f", preset `{loss.preset}`" if loss.preset else ""
    label = f"{loss.limit}{preset}, {loss.prompt_tokens} tokens"
    lines = (
        f"*{loss.question}* Full KV: {loss.expected}. This run, {label}: {loss.came}",
        loss.verdict,
        f"Why it was missed: {loss.why}.",
        loss.held.sentence(loss.full_kv_bytes),
    )
    return "\n>\n".join(f"> {line}" for line in lines)


def with_losses(page: str) -> str:
    """The page with every quotation made anew; each stands between two marks that name its method."""
    for loss in gallery.losses():
        previous, mark, rest = page.partition(f"<!-- loss of {loss.method}: begin -->\n")
        _, end, following = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"the page has no marks for the loss of {loss.method}.")
        page = f"{previous}{mark}{quoted(loss)}\n{end}{following}"
    return page

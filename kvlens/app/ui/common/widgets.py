"""Small pieces every page uses. Text from data is escaped before Streamlit reads it as Markdown."""

from __future__ import annotations

import functools
import html
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import streamlit as st

from kvlens.app.figures.columns import column_words
from kvlens.app.figures.methodmarks import mark
from kvlens.app.ui.common import session
from kvlens.app.ui.common.pagewords import page_words
from kvlens.app.ui.common.terms import show_terms
from kvlens.store.errors import TraceError
from kvlens.text.failures import debugging, unexpected
from kvlens.text.plaintext import visible

#: How the message about an unexpected error begins.
FAILED = "This page failed:"
_LOG = logging.getLogger(__name__)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:^=&])")
_INSIDE = re.compile(r"(?<=[^\W_])\\_(?=[^\W_])|\\[().=+-]")
"""escapes that Markdown does not need inside a line: of an underscore inside a word, and of what begins a list"""

_SHORTCODE = re.compile(r":(?=[\w+/-]+:)")
_ADDRESS = re.compile(r"(?<=[a-z]:)(?=//)|(?<=www)(?=\.)|(?<=@)", re.IGNORECASE)
"""inside whatever Markdown makes a link of by itself"""

_COPY_HTML = '<button id="copy" type="button" title="Copy a link that restores this selection">Copy link</button>'
_COPY_CSS = """
button { font: inherit; font-family: var(--st-font); color: var(--st-text-color);
  background: var(--st-secondary-background-color); border: 1px solid var(--st-border-color); border-radius: 5px;
  padding: 4px 12px; min-height: 38px; width: 100%; cursor: pointer; }
button:focus-visible { outline: 2px solid var(--st-primary-color); }
"""
_COPY_JS = """
export default function ({ parentElement }) {
  const button = parentElement.querySelector("#copy");
  const say = (text) => { button.textContent = text; setTimeout(() => { button.textContent = "Copy link"; }, 1500); };
  const copied = () => navigator.clipboard.writeText(window.location.href);
  button.onclick = () => copied().then(() => say("Copied"), () => say("Not allowed"));
}
"""
_copy_link = st.components.v2.component("kvlens_copy_link", html=_COPY_HTML, css=_COPY_CSS, js=_COPY_JS)


def plain(text: str) -> str:
    """`text` so that Markdown shows it literally, on one line. Streamlit looks for names of icons and emojis, and for
    addresses, when the escapes are gone already: a joiner of no width keeps ':home:' and 'http://' from being one."""
    line = visible(" ".join(text.split()))
    return _MARKDOWN.sub(r"\\\1", _ADDRESS.sub("\u2060", _SHORTCODE.sub(":\u2060", line)))


def label(text: str) -> str:
    """Return `plain` text for the label of a field, without the escapes that Markdown does not need: the name that
    assistive technology reads is the label as it is written."""
    escaped = plain(text)

    def bare(match: re.Match[str]) -> str:
        prefix = escaped[: match.start()]
        return match.group()[1] if prefix and not prefix.isdigit() else match.group()

    return _INSIDE.sub(bare, escaped)


def page_sentence(sentence: str) -> str:
    """Return a sentence of the command line as Markdown of a page: its options by their fields, all else literal."""
    return plain(page_words(sentence))


def error(sentence: str, log: Iterable[str] = ()) -> None:
    """An error box: one sentence, options in it by their fields, and the tail of a log where there is one."""
    st.error(page_sentence(sentence))
    lines = list(log)
    if lines:
        st.code(visible("\n".join(lines)), language=None, wrap_lines=True, height=240)


def headings(names: Iterable[str], mapping: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of columns that are called as in files: what a table writes over each, and says on hover. mapping: columns that
    have words or a form of their own."""
    words = {name: column_words(name) for name in names}
    shown = {name: st.column_config.Column(title, help=sentence or None) for name, (title, sentence) in words.items()}
    return shown | dict(mapping or {})


def guarded(render: Callable[[], None]) -> Callable[[], None]:
    """`render`, with an unexpected error shown as one sentence and written to the server's log in full."""

    @functools.wraps(render)
    def rendered() -> None:
        try:
            render()
        except TraceError as problem:  # the run is gone, or its file can be read no more
            error(str(problem))
            st.page_link("pages/home.py", label="All runs", icon=":material/list:")
        except Exception as problem:  # Streamlit's own control flow is not an Exception
            _LOG.exception("a page failed")
            error(f"{FAILED} {unexpected(problem, 'the server log has the details, please report them')}")
            if debugging():
                with st.expander("Details"):
                    st.code(visible("".join(traceback.format_exception(problem))), language=None, wrap_lines=True)

    return rendered


def notice(problems: list[str]) -> None:
    """One notice for everything that had to be changed in the URL's selection."""
    if problems:
        st.warning(plain("; ".join(problems) + "."))


def method_mark(name: str, title: str | None = None, text: str = "") -> None:
    """A method as figures draw it: its symbol in its family's colour, its title, its family in words."""
    look = mark(name)
    sentence = html.escape(f"{title or name} · {look.family.replace('_', ' ')}")
    st.html(
        f'{html.escape(text)}<span style="color:{look.color}" aria-hidden="true">{look.character}</span> {sentence}'
    )


def condition_line(line: str, title: str = "") -> None:
    """The condition of what the page shows, below its head, and the terms of the page with that title. The images of
    the page's figures have the condition too."""
    session.set_condition(line)
    if line:
        with st.container(key="condition", horizontal=True, vertical_alignment="center"):
            st.text(visible(line), width="content")
            show_terms(title)


def copy_link() -> None:
    """Button that copies the address of the page, which holds the selection."""
    _copy_link(key="copy_link")


def status_banner(status: str, n_steps: int, reason: str | None) -> None:
    """Says that a run is not whole; silent for completed runs."""
    if status == "completed":
        return
    where = f"recorded to step {n_steps - 1}" if n_steps else "no step was recorded"
    why = f": {reason}" if reason else ""
    st.warning(plain(f"This run {'failed' if status == 'failed' else f'is {status}'}; {where}{why}"))

"""The page that a browser gets in place of the dashboard until it brings the token."""

from __future__ import annotations

from html import escape
from urllib.parse import parse_qsl

from kvlens.app.ui.common.access import PARAMETER

POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'self'"
SENTENCE = "This dashboard opens with its token: use the address that the server printed when it started."
WRONG = "This is not the token of this server."
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>kvlens: token</title>
<meta name="viewport" content="width=device-width">
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem;
color-scheme: light dark; }} input, button {{ font: inherit; padding: .3rem .6rem; }} input {{ width: 22rem;
max-width: 100%; }}</style>
<h1>kvlens</h1><p>{sentences}</p>
<form method="get" action="{path}">{fields}<label>Token <input name="{parameter}" type="password" autofocus required
autocomplete="off"></label> <button>Open</button></form></html>
"""


def token_page(path: str, query: str, wrong: bool) -> str:
    """Return the page, which asks for the token and leads to `path` with `query`. `wrong`: another token was given."""
    fields = "".join(
        f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">'
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    sentences = f"{WRONG} {SENTENCE}" if wrong else SENTENCE
    return _PAGE.format(sentences=sentences, path=escape(path), fields=fields, parameter=PARAMETER)

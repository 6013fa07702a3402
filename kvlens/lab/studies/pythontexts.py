"""Texts of the app's Python sources that a person reads: literal strings and f-strings. They are found in the syntax
tree; no source is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from kvlens.lab.studies.pagetext import PageText, is_read, shown

KINDS = {
    "title": "title",
    "header": "title",
    "subheader": "title",
    "caption": "caption",
    "button": "button",
    "download_button": "button",
    "page_link": "button",
    "link_button": "button",
    "popover": "button",
    "error": "error",
    "info": "notice",
    "warning": "notice",
    "success": "notice",
    "notice": "notice",
    "spinner": "notice",
    "expander": "label",
    "metric": "label",
    "tabs": "label",
    "segmented_control": "label",
    "selectbox": "label",
    "multiselect": "label",
    "radio": "label",
    "checkbox": "label",
    "toggle": "label",
    "slider": "label",
    "select_slider": "label",
    "text_input": "label",
    "text_area": "label",
    "number_input": "label",
    "file_uploader": "label",
    "Column": "label",
    "Page": "title",
}
"""function of Streamlit or of a helper -> what its first text is on a page"""
ARGUMENTS = {
    "help": "tooltip",
    "label": "label",
    "placeholder": "placeholder",
    "title": "title",
    "title_text": "title",
    "show_spinner": "notice",
    "hovertemplate": "tooltip",
    "name": "label",
    "text": "sentence",
    "caption": "caption",
    "sentence": "sentence",
}
"""keyword -> what its text is on a page"""
UNREAD = frozenset(
    ("key", "icon", "type", "format", "mode", "encoding", "errors", "width", "height", "color", "vertical_alignment")
)
"""keywords whose texts nobody reads"""
UNREAD_CALLS = frozenset(
    (
        "compile",
        "import_module",
        "getenv",
        "execute",
        "component",
        "exception",
        "debug",
        "TypeVar",
        "get",
        "pop",
        "open",
    )
)
"""functions whose texts nobody reads"""


def texts_of_python(source: str, file: str) -> list[PageText]:
    """Return the texts of a Python source that a person reads, in order."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    results = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) or not _is_whole(node, parents):
            continue
        text = _text_of(node)
        kind = None if text is None else _kind(node, parents)
        if text is None or kind is None:
            continue
        if is_read(shown(text), kind):
            results.append(PageText(file, node.lineno, kind, shown(text)))
    return sorted(set(results), key=lambda item: (item.line, item.kind, item.text))


def _is_whole(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return True unless the string is a part of a longer one, or documentation."""
    parent = parents.get(node)
    if isinstance(parent, ast.JoinedStr | ast.Expr):
        return False
    if any(isinstance(ancestor, ast.FormattedValue) for ancestor in _ancestors(node, parents)):
        return False  # its text is in the placeholder
    return not (isinstance(parent, ast.BinOp) and _text_of(parent) is not None)


def _text_of(node: ast.AST) -> str | None:
    """Return the text of a string expression with placeholders; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [(_text_of(side), side) for side in (node.left, node.right)]
        if any(text for text, _ in sides) and all(text is not None or _is_slot(side) for text, side in sides):
            return "".join(f"«{_name_of(side)}»" if text is None else text for text, side in sides)
    return None


def _is_slot(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.IfExp | ast.Subscript)


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return f"«{_name_of(node.value)}»" if isinstance(node, ast.FormattedValue) else ""


def _name_of(node: ast.AST) -> str:
    """Return what stands in a placeholder: the texts of a choice, else a short name of the value."""
    if isinstance(node, ast.IfExp):
        return f"{_name_of(node.body)}|{_name_of(node.orelse)}"
    text = _text_of(node)
    if text is not None:
        return text
    if isinstance(node, ast.Call):
        return _name_of(node.args[0]) if node.args and not isinstance(node.args[0], ast.Starred) else _callee(node)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _name_of(node.slice) if isinstance(node.slice, ast.Constant) else _name_of(node.value)
    if isinstance(node, ast.Name):
        return node.id
    return "…"


def _callee(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _kind(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Return what a text is on a page; None for a text that nobody reads."""
    child: ast.AST = node
    kind = "sentence"
    for parent in _ancestors(node, parents):
        if isinstance(parent, ast.keyword):
            if parent.arg in UNREAD:
                return None
            if parent.arg in ARGUMENTS:
                return ARGUMENTS[parent.arg]
        elif isinstance(parent, ast.Call):
            name = _callee(parent)
            if name in UNREAD_CALLS or (name == "html" and _is_style(node)):
                return None
            if name in KINDS and child in parent.args:
                return KINDS[name]
        elif isinstance(parent, ast.Subscript | ast.Compare | ast.AnnAssign):
            if child is not getattr(parent, "value", None):
                return None
        elif isinstance(parent, ast.Raise):
            return "error"
        elif isinstance(parent, ast.stmt):
            return kind
        child = parent
    return kind


def _is_style(node: ast.expr) -> bool:
    return bool(re.match(r"\s*<style", _text_of(node) or ""))


def _ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent

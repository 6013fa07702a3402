"""The outcome of a gate as JUnit XML, which CI systems show: a test case for every threshold of every arm."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from kvlens.studies.checks import Check

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(name: str, checks: Sequence[Check], properties: Mapping[str, object]) -> bytes:
    """Return the XML of one test suite. A failure's type is the check's state: missed, undecided or not_run.

    Args:
        name: of the suite.
        properties: what the suite was measured with, for example study, model and version.
    """
    failures = sum(not check.passed for check in checks)
    suite = ElementTree.Element("testsuite", name=_text(name), tests=str(len(checks)), failures=str(failures))
    listed = ElementTree.SubElement(suite, "properties")
    for key, value in properties.items():
        ElementTree.SubElement(listed, "property", name=key, value=_text(value))
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_text(check.arm), name=check.threshold, assertions=str(check.n)
        )
        measured = ElementTree.SubElement(case, "properties")
        for key in ("value", "low", "high", "limit"):
            if not math.isnan(number := float(getattr(check, key))):
                ElementTree.SubElement(measured, "property", name=key, value=f"{number:.9g}")
        if check.group:
            ElementTree.SubElement(measured, "property", name="group", value=_text(check.group))
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = _text(check.sentence)
        else:
            ElementTree.SubElement(case, "failure", type=check.state, message=_text(check.sentence))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def _text(value: object) -> str:
    """A text without characters that XML cannot hold."""
    return _NOT_IN_XML.sub("?", str(value))

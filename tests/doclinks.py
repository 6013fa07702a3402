"""Links of the docs: every relative link of a Markdown page leads to a file, and every anchor to a heading. Asks no
network. `python tests/doclinks.py` prints the broken ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
CODE = re.compile(r"^(```|~~~).*?^\1 *$|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files of the repository, new ones too."""
    listed = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    output = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    files = sorted(root / name for name in set(output.splitlines()))
    return [path for path in files if path.is_file() and not path.is_symlink()]


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MkDocs make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page."""
    text = re.sub(r"^(```|~~~).*?^\1 *$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return frozenset(slug(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE))


def links(path: Path) -> Iterator[str]:
    """Yield the targets of a page's links; none of those inside code."""
    yield from LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))


def broken(root: Path = ROOT) -> list[str]:
    """Return every link without its file or heading: 'docs/lens.md: gone.md#part'."""
    problems = []
    for path in pages(root):
        for target in links(path):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = path if not name else (path.parent / name).resolve()
            whole = file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file))
            if not whole:
                problems.append(f"{path.relative_to(root)}: {target}")
    return problems


def main() -> int:
    """Print the broken links; return 1 if there is one."""
    problems = broken()
    print("\n".join(problems) or "No link is broken.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

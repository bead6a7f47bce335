"""The pages of the documentation, their fenced blocks, and the commands in them.

A block of the language `console`, `sh` or `bash` is run; in `console`, commands follow `$ `, further lines of a command
follow `> `, and the rest is what the command must print (`…` stands for anything in a line, alone for any lines).
What a page asks of its test stands in comments that no reader sees:

    <!-- sandbox: NAME -->      on top: where its commands run (`doc_sandbox.SANDBOXES`)
    <!-- not run: REASON -->    above a block: it needs something that no test has
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.interpreter import ROOT

RUNNABLE = frozenset({"console", "sh", "bash"})
DEFAULT_SANDBOX = "server"

_FENCE = re.compile(r"^( *)(```+)(\S*)([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"<!-- (not run|sandbox): (.+?) -->")
_ABOVE = re.compile(r"<!-- not run: ((?:(?!-->).)+?) -->\s*\Z")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: `language` may be empty, `not_run` is the reason or empty, `line` is 1-based."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command as a reader would type it; `expected` is None if the page does not show what it prints."""

    where: str
    command: str
    expected: str | None


def pages() -> list[Path]:
    """Every page that people read: the READMEs and the Markdown files below docs."""
    return [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sandbox_of(page: Path) -> str:
    """Name of the sandbox that the page asks for."""
    notes = [value for kind, value in _NOTE.findall(page.read_text(encoding="utf-8")) if kind == "sandbox"]
    assert len(notes) <= 1, f"{page}: more than one sandbox"
    return notes[0] if notes else DEFAULT_SANDBOX


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8") if text is None else text
    found = []
    for match in _FENCE.finditer(text):
        above = _ABOVE.search(text[: match.start()])
        block = Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match[3],
            text=textwrap.dedent(match[5]),
            not_run=above[1] if above else "",
        )
        found.append(block)
    return found


def steps(block: Block) -> list[Step]:
    """The commands of a runnable block."""
    if block.language != "console":
        return [Step(where=block.name, command=block.text.strip("\n"), expected=None)]
    found: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            found.append((number, [line[2:]], []))
        elif line.startswith("> ") and found and not found[-1][2]:
            found[-1][1].append(line[2:])
        else:
            assert found, f"{block.name}: output before the first command"
            found[-1][2].append(line)
    place = block.page.relative_to(ROOT)
    return [
        Step(where=f"{place}:{number}", command="\n".join(command), expected="\n".join(output) if output else None)
        for number, command, output in found
    ]


def matches(expected: str, printed: str) -> bool:
    """Whether a command printed what the page shows, but for ids, times, widths of columns and white space at ends."""
    parts = []
    for line in _trimmed(expected):
        if line.strip() == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(".*?".join(map(re.escape, line.split("…"))) + r"\n")
    return re.fullmatch("".join(parts), "".join(f"{line}\n" for line in _trimmed(printed))) is not None


#: What differs from run to run, and what stands for it.
_MOMENTARY = (
    (r"\b\d+ gpu7\b", "PID gpu7"),
    (r"\bgpu7-\d+-[0-9a-f]{12}\b", "gpu7-PID-ID"),
    (r'\bpid="\d+",process="[0-9a-f]{12}"', "PID,ID"),
    (r"\b\d+ s ago\b", "N s ago"),
    (r"\b\d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\]", "TIME"),
    (r"\b\d+\.\d\ds\b", "N s"),
    (r"(?<=\S) {2,}(?=\S)", "  "),
)


def _trimmed(text: str) -> list[str]:
    for pattern, word in _MOMENTARY:
        text = re.sub(pattern, word, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def command_lines(page: Path) -> Iterator[tuple[str, str]]:
    """Every `kvmend …` that a page shows, in a block of whatever kind or between backticks, with its place."""
    text = page.read_text(encoding="utf-8")
    place = page.relative_to(ROOT)
    for block in blocks(page, text):
        if block.language in RUNNABLE:
            for step in steps(block):
                yield from ((step.where, found) for found in _kvmend_in(step.command))
        elif block.language in {"dockerfile", "yaml"}:
            yield from ((block.name, found) for found in _kvmend_in(block.text))
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in re.finditer(r"`(kvmend [^`]+)`", prose):
        yield f"{place}:{prose.count(chr(10), 0, match.start()) + 1}", match[1]


def _kvmend_in(text: str) -> Iterator[str]:
    joined = text.replace("\\\n", " ")
    for match in re.finditer(r"(?:^|[;&|(]\s*|\s)(kvmend [a-z][^;&|)>\n]*)", joined):
        if "pip install" not in joined[max(0, match.start() - 40) : match.start()].rpartition("\n")[2]:
            yield match[1].partition(" #")[0].strip()

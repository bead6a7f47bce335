"""A body of source by its qualified name, without importing anything and, normally, without parsing the file.

Scheduler files have thousands of lines and every process judges them at start-up, so only the lines of the body
are parsed. Cutting by indentation cannot go wrong in silence: strings are known before, a cut inside a bracket does
not parse, and whatever else is in doubt (a conditional definition, a decorator of several lines) is left to a parse
of the whole file.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings

from kvmend.fingerprint import fingerprint
from kvmend.fix import BodySource

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)

#: A comment or a string literal: what is in one is no code, whatever it looks like.
_NO_CODE = re.compile(
    r'''#[^\n]*|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""|"(?:[^"\\\n]|\\.)*"'''
    r"""|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''|'(?:[^'\\\n]|\\.)*'""",
    re.DOTALL,
)


def find_body(text: str, module: str, qualname: str, path: str) -> BodySource | None:
    """The body that a qualified name means once the module has run: the last definition of the name.

    Args:
        text: Source of the module.
        module: Dotted module name, for the key.
        qualname: As in "Class.method"; any depth.
        path: Where the text is, as the user would open it.

    Returns:
        The body, or None where the module has no such definition, where the last one is under a condition that only
        running it decides, or where the file is not Python to this interpreter.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    names = qualname.split(".")
    if not re.search(rf"\b(?:def|class)[\s\\]+{re.escape(names[-1])}\b", text):
        return None
    # Only "\n" ends a line of Python; str.splitlines knows eight more characters that do.
    lines = (
        text.splitlines(keepends=True) if text.isascii() and "\f" not in text else re.findall(r"[^\n]*\n|[^\n]+", text)
    )
    try:
        with warnings.catch_warnings():
            # An invalid escape in somebody's source is not for our users to read about, and no error under -W error.
            warnings.simplefilter("ignore")
            found = _by_indentation(lines, _inside_strings(text), names) or _by_parsing(text, lines, names)
            if found is None:
                return None
            node, line, segment = found
            digest = fingerprint(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return BodySource(key=f"{module}:{qualname}", path=path, line=line, text=segment, tree=node, fingerprint=digest)


def _by_parsing(text: str, lines: list[str], names: list[str]) -> tuple[Definition, int, str] | None:
    node = _by_tree(ast.parse(text), names)
    if node is None:
        return None
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node, node.lineno, "".join(lines[start - 1 : node.end_lineno])


def _by_tree(tree: ast.Module | Definition, names: list[str]) -> Definition | None:
    for node in reversed(tree.body):
        if isinstance(node, _DEFINITIONS):
            if node.name == names[0]:
                return node if len(names) == 1 else _by_tree(node, names[1:])
        elif _may_define(node, names[0]):
            return None
    return None


def _may_define(node: ast.AST, name: str) -> bool:
    """Whether a statement has a definition of the name in its branches; what is inside definitions is no matter."""
    if isinstance(node, _DEFINITIONS):
        return node.name == name
    return any(_may_define(child, name) for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))


@functools.lru_cache(maxsize=2)  # the bodies of one module are read in a row
def _inside_strings(text: str) -> frozenset[int]:
    """Numbers of the lines that begin inside a string."""
    inside: set[int] = set()
    line = position = 0
    for match in _NO_CODE.finditer(text):
        more = text.count("\n", *match.span())
        if more:
            line += text.count("\n", position, match.start())
            inside.update(range(line + 1, line + more + 1))
            line, position = line + more, match.end()
    return frozenset(inside)


def _by_indentation(lines: list[str], inside: frozenset[int], names: list[str]) -> tuple[Definition, int, str] | None:
    """Node, line and text, or None where only the whole tree can tell (or there is no such name)."""
    first, last, indent = 0, len(lines), ""
    start = 0
    for depth, name in enumerate(names):
        pattern = re.compile(rf"{indent}([ \t\f]*)(?:class|def|async\s+def)\s+{re.escape(name)}\b")
        named = [number for number in range(first, last) if name in lines[number] and number not in inside]
        matches = {number: match[1] for number in named if (match := pattern.match(lines[number]))}
        here = [number for number, deeper in matches.items() if not deeper]
        if len(here) != 1 or max(matches) != here[0]:
            return None
        start = here[0]
        last = _end_of_block(lines, inside, start, last, len(indent))
        if depth < len(names) - 1:
            first = start + 1
            inner = _indent_of_body(lines, first, last)
            # A header of several lines would have its own indentation taken for that of the body.
            if inner is None or len(inner) <= len(indent) or not re.search(r":\s*(#.*)?$", lines[start]):
                return None
            indent = inner
    top = _first_decorator(lines, inside, start, len(indent))
    if top is None:
        return None
    segment = "".join(lines[top:last])
    try:
        wrapper = ast.parse(f"if 1:\n{segment}" if indent else segment)
    except (SyntaxError, ValueError):
        return None
    body = wrapper.body[0].body if indent and isinstance(wrapper.body[0], ast.If) else wrapper.body
    if len(body) != 1 or not isinstance(body[0], _DEFINITIONS):
        return None
    return body[0], start + 1, segment


def _end_of_block(lines: list[str], inside: frozenset[int], start: int, limit: int, width: int) -> int:
    """One past the last line of the block that starts at `start` with an indentation of `width`."""
    end = start + 1
    for number in range(start + 1, limit):
        stripped = lines[number].lstrip()
        if number not in inside:
            if not stripped or stripped.startswith("#"):
                continue
            if len(lines[number]) - len(stripped) <= width and stripped[0] not in ")]}":
                break
        end = number + 1
    return end


def _first_decorator(lines: list[str], inside: frozenset[int], start: int, width: int) -> int | None:
    """The line of the first decorator, `start` if there is none, or None where brackets make it hard to tell."""
    top, closed = start, False
    for number in range(start - 1, -1, -1):
        stripped = lines[number].strip()
        indentation = len(lines[number]) - len(lines[number].lstrip())
        if number in inside or not stripped or stripped[0] == "#" or indentation > width:
            continue
        if stripped[0] == "@":
            top, closed = number, False
        elif stripped[0] in ")]}" and not stripped.endswith(":"):
            closed = True
        else:
            unsure = (
                closed or stripped.endswith(",") or sum(map(stripped.count, ")]}")) > sum(map(stripped.count, "([{"))
            )
            signature = stripped[0] in ")]}"
            return None if (unsure and not signature) or (number and lines[number - 1].endswith("\\\n")) else top
    return None if closed else top


def _indent_of_body(lines: list[str], first: int, last: int) -> str | None:
    for number in range(first, last):
        stripped = lines[number].lstrip()
        if stripped and not stripped.startswith("#") and lines[number][0] in " \t":
            return lines[number][: len(lines[number]) - len(stripped)]
    return None

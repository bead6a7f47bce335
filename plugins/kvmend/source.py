"""A body of source by its qualified name, without importing anything and, normally, without parsing the file.

Scheduler files have thousands of lines and every process judges them at start-up, so only the lines of the body
are parsed. Cutting by indentation cannot go wrong in silence: a cut inside a string or a bracket does not parse,
and then the whole file is.
"""

from __future__ import annotations

import ast
import re

from kvmend.fingerprint import fingerprint
from kvmend.fix import BodySource

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find_body(text: str, module: str, qualname: str, path: str) -> BodySource | None:
    """The body that a qualified name means once the module has run: the last definition of the name.

    Args:
        text: Source of the module.
        module: Dotted module name, for the key.
        qualname: As in "Class.method"; any depth.
        path: Where the text is, as the user would open it.

    Returns:
        The body, or None where the module has no such definition, or the file is not Python to this interpreter.
    """
    lines = text.splitlines(keepends=True)
    found = _by_indentation(lines, qualname.split("."))
    if found is None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return None
        node = _by_tree(tree, qualname.split("."))
        if node is None:
            return None
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found = node, node.lineno, "".join(lines[start - 1 : node.end_lineno])
    node, line, segment = found
    return BodySource(
        key=f"{module}:{qualname}", path=path, line=line, text=segment, tree=node, fingerprint=fingerprint(node)
    )


def _by_tree(tree: ast.Module | Definition, names: list[str]) -> Definition | None:
    for node in reversed(tree.body):
        if isinstance(node, _DEFINITIONS) and node.name == names[0]:
            return node if len(names) == 1 else _by_tree(node, names[1:])
    return None


def _by_indentation(lines: list[str], names: list[str]) -> tuple[Definition, int, str] | None:
    """Node, line and text, or None where only the whole tree can tell (or there is no such name)."""
    first, last, indent = 0, len(lines), ""
    start = 0
    for depth, name in enumerate(names):
        pattern = re.compile(rf"{indent}(?:class|def|async\s+def)\s+{re.escape(name)}\b")
        matches = [number for number in range(first, last) if pattern.match(lines[number])]
        if len(matches) != 1:
            return None
        start = matches[0]
        last = _end_of_block(lines, start, last, len(indent))
        if depth < len(names) - 1:
            first = start + 1
            inner = _indent_of_body(lines, first, last)
            if inner is None or len(inner) <= len(indent):
                return None
            indent = inner
    top = start
    while top > 0 and lines[top - 1].startswith(indent + "@"):
        top -= 1
    if top > 0 and lines[top - 1].startswith(indent + ")"):
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


def _end_of_block(lines: list[str], start: int, limit: int, width: int) -> int:
    """One past the last line of the block that starts at `start` with an indentation of `width`."""
    end = start + 1
    for number in range(start + 1, limit):
        stripped = lines[number].lstrip()
        if not stripped or stripped.startswith("#"):
            continue
        if len(lines[number]) - len(stripped) <= width and stripped[0] not in ")]}":
            break
        end = number + 1
    return end


def _indent_of_body(lines: list[str], first: int, last: int) -> str | None:
    for number in range(first, last):
        stripped = lines[number].lstrip()
        if stripped and not stripped.startswith("#") and lines[number][0] in " \t":
            return lines[number][: len(lines[number]) - len(stripped)]
    return None

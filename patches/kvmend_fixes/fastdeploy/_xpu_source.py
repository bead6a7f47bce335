"""Reads from a syntax tree whether a statement is reached, configuration by configuration.

Nothing is imported or run: the tests that lead to a statement are evaluated for every configuration that can be told
apart. A test that mentions anything else cannot be read, and then nothing is decided.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvmend.api import BodySource, record

#: Which platform the process is on, as the source asks for it.
_PLATFORM = {"is_xpu": True, "is_cuda": False, "is_intel_hpu": False, "is_maca": False, "is_iluvatar": False}


class Unreadable(Exception):
    """The source says something that this reader does not understand; the message names file and line."""

    def __init__(self, source: BodySource, node: ast.AST | None, problem: str) -> None:
        # A body deep in a class is parsed on its own: its line numbers start with the body, not with the file.
        first = getattr(source.tree, "lineno", 1)
        line = source.line + (getattr(node, "lineno", first) - first if node is not None else 0)
        super().__init__(f"{source.path}:{line}: {problem}")


@record(frozen=True, kw_only=True)
class Configuration:
    """What the launch rules of all known generations depend on.

    Attributes:
        splitwise: The role is "prefill" or "decode", not "mixed".
        cpu_blocks: `num_cpu_blocks` > 0.
        storage: A KV-cache storage backend is named.
        prefix_caching: Prefix caching is on; without it a mixed server starts no cache service.
    """

    splitwise: bool
    cpu_blocks: bool
    storage: bool
    prefix_caching: bool

    @property
    def name(self) -> str:
        """As in "mixed+cpu+prefix"; the key in the facts of a finding."""
        parts = ["splitwise" if self.splitwise else "mixed"]
        parts += ["cpu"] * self.cpu_blocks + ["storage"] * self.storage + ["prefix"] * self.prefix_caching
        return "+".join(parts)

    @property
    def possible(self) -> bool:
        """Whether FastDeploy starts with it: a storage backend without prefix caching is refused by its arguments."""
        return self.prefix_caching or not self.storage

    def values(self) -> dict[str, Any]:
        """What the attributes that the source asks for are worth, by the last part of their name."""
        return {
            "splitwise_role": "prefill" if self.splitwise else "mixed",
            "enable_splitwise": int(self.splitwise),
            "num_cpu_blocks": 8 if self.cpu_blocks else 0,
            # Set if swap space is asked for, which is where the CPU blocks come from. Swap space for less than one
            # block sets it, too, and a worker cannot know.
            "enable_hierarchical_cache": self.cpu_blocks,
            "kvcache_storage_backend": "attention_store" if self.storage else None,
            "enable_prefix_caching": self.prefix_caching,
            # The V1 cache manager starts no cache service; the fix stays out there and asks at run time.
            "ENABLE_V1_KVCACHE_MANAGER": 0,
        }


CONFIGURATIONS = tuple(
    Configuration(splitwise=splitwise, cpu_blocks=cpu, storage=storage, prefix_caching=prefix)
    for splitwise, cpu, storage, prefix in itertools.product((False, True), repeat=4)
)


def evaluate(source: BodySource, node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Value of a test for known values of the names in it.

    Every operand is evaluated, whatever the others are, so that what can be read never depends on the configuration.

    Raises:
        Unreadable: There is a name without a value, or a kind of expression that known sources do not use.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in values:
            return values[name]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not evaluate(source, node.operand, values)
    elif isinstance(node, ast.BoolOp):
        operands = [bool(evaluate(source, operand, values)) for operand in node.values]
        return all(operands) if isinstance(node.op, ast.And) else any(operands)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _COMPARE.get(type(node.ops[0]))
        if compare is not None:
            return compare(evaluate(source, node.left, values), evaluate(source, node.comparators[0], values))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PLATFORM:
        return _PLATFORM[node.func.attr]
    raise Unreadable(source, node, f"`{ast.unparse(node)}` is no test of a known launch rule")


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda left, right: bool(left == right),
    ast.NotEq: lambda left, right: bool(left != right),
    ast.Gt: lambda left, right: bool(left > right),
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
}

Tests = tuple[tuple[ast.expr, bool], ...]


def paths_to(source: BodySource, wanted: Callable[[ast.AST], bool]) -> list[tuple[ast.AST, Tests]]:
    """Every wanted node of a body with the tests that lead to it, and whether each must hold or fail."""
    return list(_walk(source.tree.body, (), wanted))


def _walk(nodes: Any, tests: Tests, wanted: Callable[[ast.AST], bool]) -> Iterator[tuple[ast.AST, Tests]]:
    for node in nodes:
        if wanted(node):
            yield node, tests
        if isinstance(node, (ast.If, ast.IfExp)):
            yield from _walk([node.test], tests, wanted)
            for branch, holds in ((node.body, True), (node.orelse, False)):
                inside = branch if isinstance(branch, list) else [branch]
                yield from _walk(inside, (*tests, (node.test, holds)), wanted)
            if isinstance(node, ast.If) and not node.orelse and _leaves(node.body[-1]):
                tests = (*tests, (node.test, False))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _walk(ast.iter_child_nodes(node), tests, wanted)


def _leaves(last: ast.stmt) -> bool:
    """Whether a branch ends the function. `return False` is how a start gives up, and then nothing is started."""
    return isinstance(last, ast.Return) and not (isinstance(last.value, ast.Constant) and last.value.value is False)


def holds(source: BodySource, tests: Tests, values: Mapping[str, Any]) -> bool:
    """Whether a statement behind these tests is reached."""
    return all(bool(evaluate(source, test, values)) is wanted for test, wanted in tests)


def calls(name: str) -> Callable[[ast.AST], bool]:
    """A predicate for `paths_to`: calls of a function or method of this name."""

    def wanted(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        return (isinstance(called, ast.Name) and called.id == name) or (
            isinstance(called, ast.Attribute) and called.attr == name
        )

    return wanted

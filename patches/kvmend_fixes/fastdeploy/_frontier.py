"""The computed frontier: which published blocks nobody has computed yet.

Pure bookkeeping on the nodes of a prefix tree; no framework is imported. A node that is published before its block
is computed is *open*. The mark sits on the node itself, not in a table of block ids, so it goes wherever the node
goes (swapped out and back, matched by others) and ends when the node is evicted: one flag per node, nothing to clean
up, never more flags than blocks.

A node at depth d holds the block of tokens [(d - 1) * block size, d * block size) of every prompt that leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

#: The mark. An attribute of the node, absent on every node that is covered.
OPEN = "kvmend_open"


class Node(Protocol):
    """What is asked of a node: the root has no parent and depth 0, a child is one deeper than its parent."""

    @property
    def parent(self) -> Node | None: ...

    @property
    def depth(self) -> int: ...

    @property
    def block_id(self) -> int: ...


def path_up(leaf: Node, above: int = 0) -> Iterator[Node]:
    """The nodes from a leaf towards the root that are deeper than `above`; the root is never among them."""
    node: Node | None = leaf
    while node is not None and node.parent is not None and node.depth > above:
        yield node
        node = node.parent


def publish(leaf: Node, above: int, computed: int) -> int:
    """Marks freshly published nodes as open.

    Args:
        leaf: The deepest node published.
        above: Depth of the deepest node that was there before.
        computed: Blocks of the prompt that hold their KV already (computed, or fetched from a storage backend).

    Returns:
        How many nodes are open now.
    """
    opened = 0
    for node in path_up(leaf, max(above, computed)):
        setattr(node, OPEN, True)
        opened += 1
    return opened


def cover(leaf: Node, start: int, end: int) -> int:
    """Marks the blocks [start, end) of a prompt as computed.

    Args:
        leaf: The deepest node of the request that computes them.
        start: First block that the chunk touches, whole or in part.
        end: One past the last block that is whole once the chunk is computed.

    Returns:
        How many nodes were open until now.
    """
    covered = 0
    for node in path_up(leaf, start):
        if node.depth <= end and getattr(node, OPEN, False):
            delattr(node, OPEN)
            covered += 1
    return covered


def first_open(leaf: Node, block_table: Sequence[int]) -> int:
    """The first block of a request that it must not read unless it computes it.

    A node whose block is not the one in the request's own table says nothing of the request's block, so it counts as
    open.

    Args:
        leaf: The deepest node of the request.
        block_table: The request's block ids.

    Returns:
        Index of the block, or the number of nodes on the path if all of them are covered.
    """
    first = leaf.depth
    known = len(block_table)
    for node in path_up(leaf):
        index = node.depth - 1
        if index >= known or node.block_id != block_table[index] or getattr(node, OPEN, False):
            first = index
    return first


def covered_end(leaf: Node) -> Node:
    """The deepest node from the root to `leaf` with no open node on its own path; the root if there is none."""
    end: Node = leaf
    for node in path_up(leaf):
        if getattr(node, OPEN, False):
            end = node.parent or node
    return end

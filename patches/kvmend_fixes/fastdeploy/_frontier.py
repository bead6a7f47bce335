"""The computed frontier: which published blocks nobody has computed yet.

Pure bookkeeping on the nodes of a prefix tree; no framework is imported. The nodes that one request adds to the tree
are a *publication*: a run of nodes, each the only one of the run at its depth, below a node that was there before. A
request computes its prompt from front to back, so that one number says which of the run are computed: those down to
that depth are covered, the deeper ones are *open*. Every node of the run refers to its publication, so that the mark
goes wherever the node goes (swapped out and back, matched by others) and ends when the node is evicted; there is
nothing to clean up.

A node at depth d holds the block of tokens [(d - 1) * block size, d * block size) of every prompt that leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

#: The mark: the publication of a node, absent on nodes that were published when they were computed.
PUBLICATION = "kvmend_publication"


class Node(Protocol):
    """What is asked of a node: the root has no parent and depth 0, a child is one deeper than its parent."""

    @property
    def parent(self) -> Node | None: ...

    @property
    def depth(self) -> int: ...

    @property
    def block_id(self) -> int: ...


class Publication:
    """What one request added to the tree at once.

    Attributes:
        above: The node below which the run hangs.
        covered: Depth down to which the blocks of the run are computed.
    """

    __slots__ = ("above", "covered")

    def __init__(self, above: Node, covered: int) -> None:
        self.above = above
        self.covered = covered


def is_open(node: Node) -> bool:
    """Whether the node was published and nobody has computed its block."""
    publication: Publication | None = getattr(node, PUBLICATION, None)
    return publication is not None and node.depth > publication.covered


def path_up(leaf: Node, above: int = 0) -> Iterator[Node]:
    """The nodes from a leaf towards the root that are deeper than `above`; the root is never among them."""
    node: Node | None = leaf
    while node is not None and node.parent is not None and node.depth > above:
        yield node
        node = node.parent


def publish(leaf: Node, above: Node, computed: int) -> int:
    """Marks freshly published nodes as open.

    Args:
        leaf: The deepest node published.
        above: The deepest node on its path that was there before.
        computed: Blocks of the prompt that hold their KV already (computed, or fetched from a storage backend).

    Returns:
        How many nodes are open now.
    """
    publication = Publication(above, max(above.depth, computed))
    node: Any = leaf
    # Runs for every block of a prompt, with nothing in it but the mark.
    for _ in range(leaf.depth - above.depth):
        node.kvmend_publication = publication
        node = node.parent
    return max(leaf.depth - publication.covered, 0)


def cover(leaf: Node, start: int, end: int) -> int:
    """Marks the blocks [start, end) of a prompt as computed.

    A chunk that starts behind an open block covers nothing of that publication: there is no reading what lies behind.

    Args:
        leaf: The deepest node of the request that computes them.
        start: First block that the chunk touches, whole or in part.
        end: One past the last block that is whole once the chunk is computed.

    Returns:
        How many nodes were open until now.
    """
    covered = 0
    node: Any = leaf
    # Runs once per chunk; `min` would be a third of it. No chunk begins before the root, so the walk ends there.
    while (depth := node.depth) > start:
        try:
            publication: Publication = node.kvmend_publication
        except AttributeError:
            node = node.parent
            continue
        before = publication.covered
        upto = end if end < depth else depth
        if start <= before < upto:
            publication.covered = upto
            covered += upto - before
        node = publication.above
    return covered


def agreeing(leaf: Node, block_table: Sequence[int], above: int = 0) -> int:
    """The depth down to which the nodes on a path hold the blocks that a request's table names.

    Args:
        leaf: The deepest node of the path.
        block_table: The request's block ids.
        above: Depth down to which the nodes are not looked at.

    Returns:
        Depth of the node above the first that holds another block, or lies behind the table's end; else of the leaf.
    """
    node: Any = leaf
    first = depth = leaf.depth
    while depth > len(block_table) and depth > above:
        depth -= 1
        first, node = depth, node.parent
    # Visits every node, in the time of an attribute or two each.
    for block_id in reversed(block_table[above:depth]):
        if node.block_id != block_id:
            first = node.depth - 1
        node = node.parent
    return first


def first_open(leaf: Node, block_table: Sequence[int], known: int = 0) -> int:
    """The first block of a request that it must not read unless it computes it.

    A node whose block is not the one in the request's own table says nothing of the request's block, so it counts as
    open.

    Args:
        leaf: The deepest node of the request.
        block_table: The request's block ids.
        known: Depth down to which the nodes are known to hold the blocks of the table, see `agreeing`.

    Returns:
        Index of the block, or the number of nodes on the path if all of them are covered.
    """
    node: Any = leaf
    first = depth = leaf.depth
    # Runs once per request and, where the nodes are known, visits a node or two of every publication on the path.
    while depth:
        try:
            publication: Publication = node.kvmend_publication
        except AttributeError:
            above = node.parent
            end = above.depth
        else:
            above = publication.above
            end = above.depth
            if publication.covered < depth:
                first = publication.covered
                if first == end:
                    node, depth = above, end  # open as a whole: its blocks do not matter
                    continue
        if depth > known and (agreed := agreeing(node, block_table, max(end, known))) < depth:
            first = min(first, agreed)
        node, depth = above, end
    return first


def covered_end(leaf: Node) -> Node:
    """The deepest node from the root to `leaf` with no open node on its own path; the root if there is none."""
    end: Node = leaf
    for node in path_up(leaf):
        if is_open(node):
            end = node.parent or node
    return end

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
    node: Node | None = leaf
    while node is not None and (depth := node.depth) > start:
        publication: Publication | None = getattr(node, PUBLICATION, None)
        if publication is None:
            node = node.parent
            continue
        upto = min(end, depth)
        if start <= publication.covered < upto:
            covered += upto - publication.covered
            publication.covered = upto
        node = publication.above
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
    node, depth = leaf, leaf.depth
    first, known = depth, len(block_table)
    # Runs once per request and visits what was matched, in the time of an attribute or two per node.
    while depth:
        publication: Publication | None = getattr(node, PUBLICATION, None)
        above = node.parent if publication is None else publication.above
        assert above is not None, "only the root has no parent"
        end = above.depth
        if publication is not None and publication.covered < depth:
            first = publication.covered
            if first == end:
                node, depth = above, end  # open as a whole: its blocks do not matter
                continue
        while depth > known and depth > end:  # the table ends before the path
            depth -= 1
            first, node = min(first, depth), node.parent  # type: ignore[assignment]
        for block_id in reversed(block_table[end:depth]):
            if node.block_id != block_id:
                first = min(first, node.depth - 1)
            node = node.parent  # type: ignore[assignment]
        depth = end
    return first


def covered_end(leaf: Node) -> Node:
    """The deepest node from the root to `leaf` with no open node on its own path; the root if there is none."""
    end: Node = leaf
    for node in path_up(leaf):
        if is_open(node):
            end = node.parent or node
    return end

"""Nodes of the double's prefix tree."""

from __future__ import annotations

from enum import Enum


class CacheStatus(Enum):
    """Where the block of a node is, or is going; also the kinds of transfer."""

    GPU = 0
    SWAP2CPU = 1
    SWAP2GPU = 2
    CPU = 3
    GPU2STORAGE = 4
    STORAGE2GPU = 5


class BlockNode:
    """One block of tokens under the blocks before it. The root has no parent, no block and depth 0."""

    def __init__(self, node_id: int, key: str | None, block_id: int, parent: BlockNode | None) -> None:
        self.node_id = node_id
        self.hash_value = key
        self.block_id = block_id
        self.parent = parent
        self.depth = parent.depth + 1 if parent is not None else 0
        self.children: dict[str, BlockNode] = {}
        self.shared_count = 0
        self.last_used = 0
        self.cache_status = CacheStatus.GPU

    @property
    def has_in_gpu(self) -> bool:
        return self.cache_status is CacheStatus.GPU

    def evictable(self) -> bool:
        """On the GPU, held by nobody, and nothing below it on the GPU."""
        below = any(child.has_in_gpu for child in self.children.values())
        return self.has_in_gpu and self.shared_count == 0 and not below

"""The KV blocks of a worker."""


class BlockPool:
    """Hands out blocks; `used` is what the dashboard shows."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.used = 0

    def allocate(self, count: int) -> "int | None":
        """Takes blocks from the pool, or returns None if there are not so many."""
        if count > self.free:
            return None
        self.free -= count
        self.used += count
        return count

    def release(self, count: int) -> None:
        """Gives blocks back."""
        self.free += count
        self.used -= count

"""What the KV blocks of a node really hold, and whether a chunk reads what its own prompt would have written.

The KV of a position depends on every token up to it, so a position is labelled with a digest of the prompt so far
(image contents included) and a block holds the labels that were written into it. Scheduled chunks write their
positions; every position that a chunk attends to must then carry the label of the request's own prompt. The oracle
knows nothing of prefix trees: it sees block tables and chunks, as a worker does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Label of a position that was computed from garbage.
GARBAGE = -1


def labels_of(content: Iterable[int]) -> list[int]:
    """One label per position: equal labels mean equal prompts up to that position."""
    label, labels = 0, []
    for token in content:
        label = hash((label, token)) & (2**62 - 1)
        labels.append(label)
    return labels


@dataclass(frozen=True)
class Chunk:
    """A scheduled piece of a prompt.

    Attributes:
        name: Id of the request.
        table: The request's block ids at that moment.
        labels: Labels of its whole prompt.
        start: First position computed.
        end: One past the last.
        need: Length of the prompt: what this request's prefill comes to.
    """

    name: str
    table: tuple[int, ...]
    labels: Sequence[int]
    start: int
    end: int
    need: int


@dataclass
class KVOracle:
    """The contents of all blocks of a node.

    Attributes:
        block_size: Tokens per block.
        reads: Positions attended to that an earlier chunk had to write.
        poisoned: Those of them that held something else.
        first_poisoned: Request, position and block of the first one, for the reader of a failed test.
        scheduled: Tokens computed.
        started: Prompt tokens of the requests of which at least one chunk was scheduled.
        avoidable: Tokens computed although their whole block had been computed before by anybody, ever, leaving out
            each request's last block: no policy, with any amount of memory, could have computed less than
            `scheduled - avoidable` tokens for these requests in this order.
    """

    block_size: int
    reads: int = 0
    poisoned: int = 0
    first_poisoned: str = ""
    scheduled: int = 0
    started: int = 0
    avoidable: int = 0
    gpu: dict[int, list[int]] = field(default_factory=dict)
    cpu: dict[int, list[int]] = field(default_factory=dict)
    store: dict[str, list[int]] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _names: set[str] = field(default_factory=set)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """One batch. A chunk may read what it and the chunks before it in the batch write; nothing later in the
        batch may spoil what it read."""
        for chunk in chunks:
            if chunk.name not in self._names:
                self._names.add(chunk.name)
                self.started += chunk.need
            self.scheduled += chunk.end - chunk.start
            self.reads += chunk.start
            wrong = self._wrong(chunk, chunk.start)
            self._count_avoidable(chunk)
            self._write(chunk, spoilt=wrong > 0)
        for chunk in chunks:
            wrong = self._wrong(chunk, chunk.end, again=True)
            assert wrong == 0 or self.poisoned, f"{chunk.name}: {wrong} positions were overwritten within the batch"

    def holds(self, table: Sequence[int], labels: Sequence[int], length: int) -> bool:
        """Whether the blocks of a table hold the first `length` positions of a prompt."""
        size = self.block_size
        return all(
            self.gpu.get(table[start // size], [])[: length - start] == list(labels[start : min(start + size, length)])
            for start in range(0, length, size)
        )

    @property
    def saving(self) -> float:
        """Share of the prompt tokens of started requests that was not computed."""
        return 1 - self.scheduled / self.started if self.started else 0.0

    @property
    def most_saving(self) -> float:
        """The most that any policy which never serves garbage could have saved."""
        return 1 - (self.scheduled - self.avoidable) / self.started if self.started else 0.0

    def swap_out(self, gpu_blocks: Sequence[int], cpu_blocks: Sequence[int]) -> None:
        """Copies blocks to host memory."""
        for gpu, cpu in zip(gpu_blocks, cpu_blocks, strict=True):
            self.cpu[cpu] = list(self.gpu.get(gpu, []))

    def swap_in(self, gpu_blocks: Sequence[int], cpu_blocks: Sequence[int]) -> None:
        """Copies blocks back from host memory."""
        for gpu, cpu in zip(gpu_blocks, cpu_blocks, strict=True):
            self.gpu[gpu] = list(self.cpu.get(cpu, []))

    def put(self, keys: Sequence[str], gpu_blocks: Sequence[int]) -> None:
        """Writes blocks to the storage backend under their keys; what is there stays."""
        for key, gpu in zip(keys, gpu_blocks, strict=True):
            self.store.setdefault(key, list(self.gpu.get(gpu, [])))

    def get(self, keys: Sequence[str], gpu_blocks: Sequence[int]) -> list[int]:
        """Reads the leading keys that the storage backend has; returns the blocks filled."""
        filled: list[int] = []
        for key, gpu in zip(keys, gpu_blocks, strict=False):
            if key not in self.store:
                break
            self.gpu[gpu] = list(self.store[key])
            filled.append(gpu)
        return filled

    def _wrong(self, chunk: Chunk, length: int, again: bool = False) -> int:
        size, total = self.block_size, 0
        for start in range(0, length, size):
            block = chunk.table[start // size]
            wanted = chunk.labels[start : min(start + size, length)]
            found = self.gpu.get(block, [])[: len(wanted)]
            if found != wanted:
                wrong = sum(1 for i, label in enumerate(wanted) if i >= len(found) or found[i] != label)
                total += wrong
                if not again and not self.first_poisoned:
                    self.first_poisoned = f"{chunk.name} reads block {block} at position {start}"
        if not again:
            self.poisoned += total
        return total

    def _write(self, chunk: Chunk, spoilt: bool) -> None:
        size = self.block_size
        for begin in range(chunk.start // size * size, chunk.end, size):
            content = self.gpu.setdefault(chunk.table[begin // size], [])
            content.extend([GARBAGE] * (size - len(content)))
            first, last = max(chunk.start, begin), min(chunk.end, begin + size)
            labels = [GARBAGE] * (last - first) if spoilt else list(chunk.labels[first:last])
            content[first - begin : last - begin] = labels
            if last == begin + size:
                self._seen.add(chunk.labels[last - 1])

    def _count_avoidable(self, chunk: Chunk) -> None:
        size = self.block_size
        last_block = (chunk.need - 1) // size
        for begin in range(chunk.start // size * size, min(chunk.end, last_block * size), size):
            if chunk.labels[begin + size - 1] in self._seen:
                self.avoidable += min(chunk.end, begin + size) - max(chunk.start, begin)

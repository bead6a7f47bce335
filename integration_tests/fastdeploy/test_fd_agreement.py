"""What a lookup remembers of the nodes it found, so that scheduling need not compare every one of them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pnode import Options, PNode
from test_fd_features import fill, first_start, serve

from kvmend_fixes.fastdeploy import _frontier

PROMPT = list(range(100, 132))
Make = Callable[..., PNode]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Depths of the nodes from which scheduling compares blocks."""
    depths: list[int] = []
    original = _frontier.agreeing

    def agreeing(leaf: Any, block_table: Any, above: int = 0) -> int:
        depths.append(leaf.depth)
        return original(leaf, block_table, above)

    monkeypatch.setattr(_frontier, "agreeing", agreeing)
    return depths


def hit(node: PNode) -> Any:
    """A request that is preallocated and has found all of PROMPT, which another one has computed."""
    serve(node, "x", PROMPT)
    node.finish("x")
    assert node.preallocate("y", PROMPT)
    return node.entries["y"].request


def started(node: PNode) -> int:
    """Where that request starts."""
    node.accept("y")
    node.step()
    return first_start(node, "y")


def path(node: PNode, name: str) -> list[Any]:
    """The nodes of a request, root first."""
    return [*_frontier.path_up(node.cache.req_leaf_map[name])][::-1]


def agreed(node: PNode) -> dict[str, Any]:
    """What is remembered."""
    found: dict[str, Any] = node.cache.kvmend_prefill_cache.agreed
    return found


def test_scheduling_compares_no_node_again(applied: Any, node: Make, compared: list[int]) -> None:
    """Catches a cost of scheduling that grows with the prompt."""
    made = node()
    hit(made)
    assert started(made) == 28
    assert made.oracle.poisoned == 0
    assert not compared
    assert not agreed(made)


def test_a_table_that_is_another_one_is_compared(applied: Any, node: Make, compared: list[int]) -> None:
    """Catches something remembered of a request that is taken for every table it ever has."""
    made = node()
    request = hit(made)
    request.block_tables = [*request.block_tables]
    assert started(made) == 28
    assert compared


def test_a_request_with_other_blocks_than_it_found_computes_them(applied: Any, node: Make) -> None:
    """Catches a read of blocks that came into the table after the lookup."""
    made = node()
    request = hit(made)
    table = [*request.block_tables]
    table[2], table[-1] = table[-1], table[2]
    request.block_tables = table
    assert started(made) == 8
    assert made.oracle.poisoned == 0


@pytest.mark.parametrize("cpu_blocks", [0, 64])
def test_a_table_that_is_no_image_of_the_path_is_not_read(
    applied: Any, node: Make, monkeypatch: pytest.MonkeyPatch, cpu_blocks: int
) -> None:
    """Catches a lookup that lists blocks in another order than the nodes: they would be read as other tokens."""
    made = node(cpu_blocks=cpu_blocks)
    match = made.cache.request_match_blocks

    def shuffled(*args: Any) -> Any:
        blocks, *rest = match(*args)
        return ([*blocks[:3], *reversed(blocks[3:])], *rest)

    serve(made, "x", PROMPT)
    made.finish("x")
    monkeypatch.setattr(made.cache, "request_match_blocks", shuffled)
    assert made.preallocate("y", PROMPT)
    assert started(made) == 12
    assert made.oracle.poisoned == 0


def test_with_host_blocks_a_node_that_moved_since_the_lookup_is_not_believed(applied: Any, node: Make) -> None:
    """Catches something remembered where a swap can make it wrong."""
    made = node(cpu_blocks=64)
    hit(made)
    assert not agreed(made)
    path(made, "y")[3].block_id += 1000
    assert started(made) == 12
    assert made.oracle.poisoned == 0


@pytest.mark.parametrize("cpu_blocks", [0, 64])
def test_nothing_moves_a_node_that_a_waiting_request_holds(applied: Any, node: Make, cpu_blocks: int) -> None:
    """Catches an eviction or a swap between preallocation and scheduling: what was remembered would be wrong."""
    made = node(blocks=40, cpu_blocks=cpu_blocks)
    request = hit(made)
    before = [(each, each.block_id) for each in path(made, "y")]
    fill(made)
    assert [(each, each.block_id) for each in path(made, "y")] == before
    assert [each.block_id for each in path(made, "y")] == request.block_tables[: len(before)]
    assert started(made) == 28
    assert made.oracle.poisoned == 0


def test_a_name_that_comes_again_is_looked_up_anew(applied: Any, node: Make) -> None:
    """Catches what was remembered of a refused request being taken for the next one of the same id."""
    made = node()
    hit(made)
    made.refuse("y")
    made.cache.can_allocate_gpu_blocks(made.options.blocks)  # evicts what nobody holds
    assert made.preallocate("y", PROMPT)
    assert agreed(made)["y"] == (made.entries["y"].request.block_tables, 0)
    assert started(made) == 0
    assert made.oracle.poisoned == 0


def test_a_request_that_finds_what_is_still_open_starts_before_it(applied: Any, node: Make) -> None:
    """Catches blocks that are known to be the request's being taken for computed."""
    made = node()
    made.preallocate("x", PROMPT)
    made.preallocate("y", PROMPT)
    assert agreed(made)["y"][1] == 8
    assert started(made) == 0
    assert made.oracle.poisoned == 0


def test_requests_that_are_never_scheduled_are_forgotten(applied: Any, node: Make) -> None:
    """Catches memory that grows with refused requests."""
    made = node()
    made.preallocate("stays", PROMPT)
    for number in range(3 * Options().slots):
        assert made.preallocate(f"r{number}", PROMPT)
        assert len(agreed(made)) <= 3
        made.refuse(f"r{number}")


def test_eager_mode_remembers_nothing(tree: Any, node: Make) -> None:
    """Catches a table that nobody empties."""
    with tree.fixed("eager"):
        made = node()
        made.preallocate("x", PROMPT)
        assert not getattr(made.cache, "kvmend_prefill_cache", None) or not agreed(made)

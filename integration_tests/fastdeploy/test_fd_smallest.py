"""The smallest cases of every fault, before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pnode import PNode

PROMPT = list(range(100, 132))

Make = Callable[..., PNode]


def starts(node: PNode) -> dict[str, int]:
    """Where each request's first chunk began."""
    first: dict[str, int] = {}
    for chunk in node.chunks:
        first.setdefault(chunk.name, chunk.start)
    return first


def test_without_the_fix_the_tree_has_the_fault_the_probe_names(tree: Any, node: Make) -> None:
    """Catches a tree that is not affected any more, or a probe that reads its source wrongly."""
    late = "no-publication" in tree.finding.features
    made = node()
    made.preallocate("x", PROMPT)
    made.preallocate("y", PROMPT)
    assert made.entries["y"].hit == (0 if late else 32)
    made.accept("y")
    made.step()
    assert (made.oracle.poisoned > 0) is not late


def test_the_same_prompt_twice_before_scheduling_hits_and_computes_only_its_last_block(
    applied: Any, node: Make
) -> None:
    """Catches publication that waits for the chunks, or a frontier that takes back what is computed in time."""
    made = node()
    made.preallocate("first", PROMPT)
    made.preallocate("second", PROMPT)
    assert made.entries["second"].hit == 32
    made.accept("first")
    made.accept("second")
    made.step()
    assert [(chunk.name, chunk.start, chunk.end) for chunk in made.chunks] == [("first", 0, 32), ("second", 28, 32)]
    assert made.oracle.poisoned == 0
    assert made.entries["second"].request.num_cached_tokens == 32


def test_after_a_refused_request_the_same_prompt_computes_everything_and_reports_no_hit(
    applied: Any, node: Make
) -> None:
    """Catches the poisoned prefix: the decode node refuses X, and Y reads blocks that X never computed."""
    made = node()
    made.preallocate("x", PROMPT)
    made.refuse("x")
    made.preallocate("y", PROMPT)
    made.accept("y")
    made.step()
    assert starts(made) == {"y": 0}
    assert made.oracle.poisoned == 0
    request = made.entries["y"].request
    assert (request.num_cached_tokens, list(request.cache_info)) == (0, [0, 8])
    assert applied.taken_back_tokens == 28


def test_the_request_that_is_accepted_first_computes_and_the_publisher_starts_behind_it(
    applied: Any, node: Make
) -> None:
    """Catches waiting for the publisher, and computing the same blocks twice."""
    made = node()
    made.preallocate("r1", PROMPT)
    made.preallocate("r2", PROMPT)
    made.accept("r2")
    made.step()
    made.accept("r1")
    made.step()
    assert starts(made) == {"r2": 0, "r1": 28}
    assert made.oracle.poisoned == 0
    assert made.entries["r1"].request.num_cached_tokens == 28


def test_a_hit_on_a_half_computed_prompt_is_cut_at_the_first_block_that_is_not_whole(applied: Any, node: Make) -> None:
    """Catches counting a block as computed that a chunk has only begun."""
    made = node(budget=18)
    made.preallocate("r1", PROMPT)
    made.preallocate("r2", PROMPT)
    made.accept("r1")
    made.step()
    made.refuse("r1")
    made.accept("r2")
    made.step()
    assert starts(made) == {"r1": 0, "r2": 16}
    assert made.oracle.poisoned == 0


def test_a_request_in_the_middle_of_a_block_goes_on_where_it_stopped(applied: Any, node: Make) -> None:
    """Catches a frontier that takes a request's own half block for a hit nobody computed."""
    made = node(budget=6)
    made.preallocate("r1", PROMPT)
    made.accept("r1")
    while made.entries["r1"].state != "prefilled":
        made.step()
    assert [chunk.start for chunk in made.chunks] == [0, 6, 12, 18, 24, 30]


def test_a_longer_prompt_computes_the_shared_part_that_nobody_computed(applied: Any, node: Make) -> None:
    """Catches covering only one's own nodes: what is lowered must be covered for the next one."""
    made = node()
    made.preallocate("short", PROMPT[:16])
    made.refuse("short")
    made.preallocate("long", PROMPT)
    made.preallocate("other", [*PROMPT[:20], *range(12)])
    made.accept("long")
    made.accept("other")
    made.step()
    assert starts(made) == {"long": 0, "other": 20}
    assert made.oracle.poisoned == 0


def test_blocks_published_twice_are_not_lost(applied: Any, node: Make) -> None:
    """Catches the blocks that are lost when two running requests publish the same nodes (PR 6226)."""
    made = node(budget=20)
    for name in ("a", "b", "c"):
        made.preallocate(name, PROMPT)
        made.accept(name)
    for _ in range(6):
        made.step()
        made.check()
    made.drain()
    assert made.lost() == 0


def test_an_evicted_node_takes_its_mark_along(applied: Any, node: Make) -> None:
    """Catches marks kept by block id: the block is reused for another prompt, computed, and hit at once."""
    made = node(blocks=20)
    made.preallocate("x", PROMPT)
    made.refuse("x")
    other = list(range(500, 560))
    made.preallocate("y", other)
    made.accept("y")
    made.step()
    made.finish("y")
    made.preallocate("z", other)
    made.accept("z")
    made.step()
    assert starts(made)["z"] == 56
    assert made.oracle.poisoned == 0


def test_the_fix_taken_off_leaves_the_tree_as_it_was(tree: Any, node: Make) -> None:
    """Catches state that outlives the fix and changes what an unmended tree does."""
    with tree.fixed("safe"):
        made = node()
        made.preallocate("x", PROMPT)
        made.accept("x")
        made.step()
    made.finish("x")
    made.preallocate("y", PROMPT)
    made.accept("y")
    made.step()
    assert starts(made)["y"] == 28
    made.drain()
    assert made.lost() == 0


@pytest.mark.parametrize("mode", ["safe", "eager"])
def test_applying_twice_in_a_row_works_like_once(tree: Any, node: Make, mode: str) -> None:
    """Catches wrappers that keep something between two applications."""
    for _ in range(2):
        with tree.fixed(mode):
            made = node()
            made.preallocate("x", PROMPT)
            made.preallocate("y", PROMPT)
            assert made.entries["y"].hit == 32

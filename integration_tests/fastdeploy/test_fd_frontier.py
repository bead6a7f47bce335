"""The pure bookkeeping, on bare nodes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmend_fixes.fastdeploy import _frontier, _reports
from kvmend_fixes.fastdeploy._frontier import (
    agreeing,
    cover,
    covered_end,
    first_open,
    is_open,
    path_up,
    publish,
)


@dataclass(eq=False)
class Node:
    parent: Node | None
    block_id: int = -1

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


def path(length: int) -> list[Node]:
    """A root and `length` nodes below it, one under the other; node d owns block d - 1."""
    nodes = [Node(None)]
    for block in range(length):
        nodes.append(Node(nodes[-1], block))
    return nodes


TABLE = list(range(64))


def test_a_path_that_nobody_published_early_has_no_open_block() -> None:
    nodes = path(5)
    assert first_open(nodes[5], TABLE) == 5


def test_an_empty_path_has_nothing_to_open_cover_or_read() -> None:
    root = path(0)[0]
    assert (publish(root, root, 0), cover(root, 0, 9), first_open(root, TABLE)) == (0, 0, 0)
    assert covered_end(root) is root


def test_published_nodes_are_open_behind_what_was_there_and_what_is_computed() -> None:
    nodes = path(6)
    assert publish(nodes[6], nodes[2], 3) == 3
    assert [is_open(node) for node in nodes[1:]] == [False, False, False, True, True, True]


def test_a_chunk_covers_whole_blocks_only() -> None:
    nodes = path(4)
    publish(nodes[4], nodes[0], 0)
    # Tokens 2 to 11 of blocks of 4: the chunk touches block 0 and ends within block 2.
    assert cover(nodes[4], 2 // 4, 11 // 4) == 2
    assert first_open(nodes[4], TABLE) == 2


def test_covering_twice_counts_once() -> None:
    nodes = path(3)
    publish(nodes[3], nodes[0], 0)
    assert (cover(nodes[3], 0, 3), cover(nodes[3], 0, 3)) == (3, 0)


def test_a_node_with_another_block_than_the_request_counts_as_open() -> None:
    nodes = path(3)
    assert first_open(nodes[3], [0, 7, 2]) == 1


def test_a_block_table_shorter_than_the_path_ends_what_can_be_read() -> None:
    assert first_open(path(3)[3], [0]) == 1


def test_nodes_agree_with_a_table_down_to_the_first_that_does_not() -> None:
    leaf = path(4)[4]
    assert agreeing(leaf, TABLE) == 4
    assert agreeing(leaf, [0, 1, 7, 7]) == 2
    assert agreeing(leaf, [0, 7, 2, 7], above=2) == 3
    assert agreeing(leaf, [0, 1]) == 2
    assert agreeing(leaf, [7], above=1) == 1
    assert agreeing(path(0)[0], []) == 0


def test_nodes_that_are_known_to_agree_are_not_compared_again() -> None:
    leaf = path(4)[4]
    assert [first_open(leaf, [7, 1, 2, 3], known) for known in (0, 1, 4)] == [0, 4, 4]


def test_a_publication_is_compared_from_where_nodes_are_not_known_any_more() -> None:
    nodes = path(6)
    publish(nodes[6], nodes[1], 6)
    assert first_open(nodes[6], [0, 1, 7, 3, 7, 5], known=3) == 4


def test_of_a_run_computed_in_part_the_computed_nodes_are_compared() -> None:
    nodes = path(6)
    publish(nodes[6], nodes[1], 4)
    assert first_open(nodes[6], [0, 1, 7, 3, 4, 5]) == 2


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 10), st.integers(0, 10), st.integers(0, 10))
def test_what_a_lookup_knows_changes_nothing_of_what_is_open(
    wrong: list[int], length: int, above: int, computed: int
) -> None:
    """Catches a shortcut past a node that is not the request's."""
    nodes, table = path(length), TABLE[:]
    for index in wrong:
        table[index] = 99
    if above < length:
        publish(nodes[length], nodes[above], computed)
    assert first_open(nodes[length], table, agreeing(nodes[length], table)) == first_open(nodes[length], table)


def test_the_mark_goes_with_the_node_when_its_block_changes() -> None:
    nodes = path(2)
    publish(nodes[2], nodes[0], 0)
    nodes[1].block_id, nodes[2].block_id = 40, 41
    assert first_open(nodes[2], [40, 41]) == 0


def test_a_node_made_anew_for_the_same_block_is_not_open() -> None:
    old = path(1)
    publish(old[1], old[0], 0)
    assert first_open(path(1)[1], TABLE) == 1


def test_what_may_be_stored_ends_before_the_first_open_node() -> None:
    nodes = path(4)
    publish(nodes[4], nodes[2], 0)
    cover(nodes[4], 3, 4)
    assert covered_end(nodes[4]) is nodes[2]


def test_nothing_may_be_stored_of_a_path_that_is_open_from_the_start() -> None:
    nodes = path(2)
    publish(nodes[2], nodes[0], 0)
    assert covered_end(nodes[2]) is nodes[0]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12), st.integers(1, 20))
def test_the_first_open_block_is_where_chunks_from_the_front_have_come_to(
    chunks: list[tuple[int, int]], length: int
) -> None:
    nodes = path(length)
    publish(nodes[length], nodes[0], 0)
    computed = 0
    for start, end in chunks:
        cover(nodes[length], start, end)
        computed = max(computed, min(end, length)) if start <= computed else computed
    assert first_open(nodes[length], TABLE) == computed


#: A request: the leaf it hangs its nodes below, how many, how many of its blocks were fetched, and its chunks.
_REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 6), st.lists(st.integers(0, 6), max_size=3)),
    min_size=1,
    max_size=12,
)


@given(_REQUESTS)
def test_in_a_tree_of_many_requests_every_node_is_open_until_somebody_computes_it(requests: Any) -> None:
    """Catches a publication that says anything of nodes that are not its own, or of a branch of its own."""
    nodes, computed = [Node(None)], set()
    for which, length, fetched, chunks in requests:
        above = leaf = nodes[which % len(nodes)]
        for _ in range(length):
            leaf = Node(leaf, len(nodes))
            nodes.append(leaf)
        line = [*path_up(leaf)][::-1]
        table = [node.block_id for node in line]
        if length:
            publish(leaf, above, fetched)
        computed.update(id(node) for node in line[above.depth : fetched])
        start = first_open(leaf, table)
        for chunk in chunks:
            cover(leaf, start, start + chunk)
            computed.update(id(node) for node in line[start : start + chunk])
            start += chunk
        right = next((index for index, node in enumerate(line) if id(node) not in computed), len(line))
        assert first_open(leaf, table) == right
        assert covered_end(leaf).depth == right
        assert [is_open(node) for node in nodes[1:]] == [id(node) not in computed for node in nodes[1:]]


def test_marks_are_on_nodes_and_nowhere_else() -> None:
    """Bounded by the number of blocks: the module keeps no table."""
    tables = [name for name, value in vars(_frontier).items() if isinstance(value, dict | list | set)]
    assert [name for name in tables if not name.startswith("__")] == []


def test_walking_up_visits_only_what_lies_deeper() -> None:
    nodes = path(5)
    assert list(path_up(nodes[5], 3)) == [nodes[5], nodes[4]]


@pytest.mark.parametrize(
    ("change", "values", "parts"),
    [
        (-5, [0, 0, 8], [0, 0, -5]),
        (-5, [4, 0, 8], [-4, 0, -1]),
        (-9, [4, 4, 8], [-4, -4, -1]),
        (-2, [4, 4, 8], [-2, 0, 0]),
        (6, [4, 4, 8], [0, 0, 6]),
    ],
)
def test_a_hit_loses_its_last_tiers_first_and_grows_on_the_gpu(
    change: int, values: list[int], parts: list[int]
) -> None:
    assert _reports._split(change, values) == parts


def test_a_counter_never_decreases_and_pays_its_debt_back(monkeypatch: pytest.MonkeyPatch) -> None:
    increments: list[float] = []
    counter = SimpleNamespace(inc=increments.append)
    metrics: Any = SimpleNamespace(prefix_cache_token_num=counter)
    monkeypatch.setattr(_reports, "_process_metrics", lambda: metrics)
    debts: dict[str, int] = {}
    _reports._count("prefix_cache_token_num", -10, debts)
    _reports._count("prefix_cache_token_num", 4, debts)
    with _reports.repaying(debts):
        metrics.prefix_cache_token_num.inc(5)
        metrics.prefix_cache_token_num.inc(20)
    assert increments == [0, 19]
    assert metrics.prefix_cache_token_num is counter
    assert not debts["prefix_cache_token_num"]

"""Who creates the KV tensors, from the code of each tree itself: engine launch, command lines, runner, proposer.

A tree is measured in a process of its own: without kvmend, with it, with it taken off, and with the condition of PR
7420 put in by hand. The doubles are of our own writing, one per generation; real trees run where there are any.
"""

from __future__ import annotations

from typing import Any

import pytest
from xputrees import ALL, DOUBLES, ONCE, known_of, measurable, real_trees


def wrong(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Rows where a KV tensor has another number of creators than one, or nobody creates it."""
    return {row["name"]: row["counts"] for row in rows if row["counts"] != [1]}


def creators(rows: list[dict[str, Any]], count: int) -> int:
    return sum(max(row["counts"]) == count for row in rows)


trees = pytest.mark.parametrize("tree", ALL)


@trees
def test_each_of_the_18_configurations_has_exactly_one_creator(tree: str, measured: Any) -> None:
    """Fails for a launch rule that is misread, and for a decision that upstream's body does not take up."""
    rows = measured(tree)["mended"]["table"]
    assert len(rows) == 18
    assert wrong(rows) == {}
    assert [row["waiting"] for row in rows] == [[]] * 18


@trees
def test_without_kvmend_the_tree_has_the_faults_that_are_known_of_it(tree: str, measured: Any) -> None:
    """Fails if the rig mends or breaks anything by itself: the counts are those read off each tree independently."""
    plain, known = measured(tree)["plain"], known_of(tree)
    assert creators(plain["table"], 2) == known.twice
    assert creators(plain["table"], 0) == known.nobody
    assert creators(plain["bare"], 0) == known.bare_nobody


@trees
def test_the_fix_ends_as_it_should_and_names_the_launch_rule(tree: str, measured: Any) -> None:
    data, known = measured(tree), known_of(tree)
    assert data["outcome"] == known.outcome, data["reason"]
    assert data["facts"]["generation"] == known.launch
    assert f"launch-{known.launch}" in data["features"]


@trees
def test_every_row_takes_the_memory_of_one_creator(tree: str, measured: Any) -> None:
    """Fails for a second set of KV tensors wherever it is made, and for a row whose tensors are missing."""
    data, known = measured(tree), known_of(tree)
    assert {row["bytes"] for row in data["mended"]["table"]} == {ONCE}
    assert sum(row["bytes"] for row in data["plain"]["table"]) == (18 + known.twice - known.nobody) * ONCE


@trees
def test_without_prefix_caching_no_cache_service_runs_and_the_runner_creates(tree: str, measured: Any) -> None:
    """Fails for PR 7420's condition even on its own tree: with swap space the server would wait for ever."""
    assert wrong(measured(tree)["mended"]["bare"]) == {}


@trees
def test_the_proposer_s_kv_tensors_have_one_creator(tree: str, measured: Any) -> None:
    """Fails for a proposer that waits, without prefix caching, for a transfer manager that was never launched."""
    data = measured(tree)
    assert wrong(data["mended"]["mtp"]) == {}
    assert wrong(data["mended"]["mtp_bare"]) == {}
    assert len(data["mended"]["mtp"]) == (18 if data["mtp"] else 0)


@trees
def test_every_rank_of_every_group_has_one_creator(tree: str, measured: Any) -> None:
    """Fails for a signal that another rank or another data parallel group listens to."""
    for name in ("ranks", "group"):
        rows = measured(tree)["mended"][name]
        assert wrong(rows) == {}, name
        assert {row["tensors"] for row in rows} == {2 * 2 * 2}, name


@trees
def test_a_runner_that_drops_its_caches_gets_the_same_tensors_again(tree: str, measured: Any) -> None:
    """Fails for a second initialization that creates what another process still holds, or that waits for ever."""
    data = measured(tree)
    assert wrong(data["mended"]["again"]) == {}
    for once, again in zip(data["mended"]["table"], data["mended"]["again"], strict=True):
        assert again["caches"] == once["caches"]
        assert again["caches"]["runner 0"] != []


@trees
def test_a_profile_run_creates_whatever_the_configuration_is(tree: str, measured: Any) -> None:
    """Fails for a profile run that is led to attach: nobody else is there yet, the server would wait for ever."""
    for state in ("plain", "mended"):
        rows = measured(tree)[state]["profile"]
        assert {tuple(row["creators"]) for row in rows} == {("runner 0",)}
        assert {tuple(row["waiting"]) for row in rows} == {()}
        assert not any(any(values) for row in rows for values in row["signals"].values())


@trees
def test_whoever_creates_sets_the_ready_signal(tree: str, measured: Any) -> None:
    """Fails for tensors that are created without telling those who wait for them."""
    for row in measured(tree)["mended"]["ranks"]:
        assert row["signals"], row["name"]
        assert all(values == [1, 1] for values in row["signals"].values()), row["name"]


@trees
def test_the_condition_of_pr_7420_fails_where_the_launch_rule_is_another(tree: str, measured: Any) -> None:
    """The negative: what a literal port would do. On its own generation it fails without prefix caching only."""
    literal, known = measured(tree)["literal"], known_of(tree)
    assert len(wrong(literal["table"])) == known.literal
    assert len(wrong(literal["bare"])) == known.bare_literal
    assert (known.literal == 0) == (known.launch == "cpu-blocks-or-storage")


@trees
def test_taken_off_the_tree_is_as_it_was(tree: str, measured: Any) -> None:
    data = measured(tree)
    assert data["removed"]["table"] == data["plain"]["table"]
    assert data["removed"]["bare"] == data["plain"]["bare"]


@trees
def test_what_was_done_is_counted(tree: str, measured: Any) -> None:
    data, known = measured(tree), known_of(tree)
    # Twice with one rank (once anew), twice with two; the rows with a proposer are the runner's as well.
    suppressed = known.twice * (1 + 2 + 2 + 2 + (1 if data["mtp"] else 0))
    assert data["counters"]["suppressed"] == suppressed
    nobody = sum(creators(data["plain"][name], 0) for name in ("table", "bare", "mtp", "mtp_bare"))
    assert (data["counters"]["supplied"] > 0) == (nobody > 0)
    assert data["counters"]["overdue"] == 0


@trees
def test_weights_cannot_be_reloaded_on_xpu_so_no_creator_can_go_missing_that_way(tree: str, measured: Any) -> None:
    """The transfer manager clears and restores tensors only with `unset_data_ipc`, which XPU lacks in every release.

    Fails for a release that brings weight reload to XPU: then clearing has creators of its own to be checked.
    """
    data = measured(tree)
    assert data["reloads"] == []
    assert data["unset_data_ipc"] is False


def test_the_doubles_cover_every_launch_rule_that_is_known() -> None:
    assert {known_of(tree).launch for tree in DOUBLES} == {"never", "cpu-blocks", "cpu-blocks-or-storage", "storage"}


def test_every_real_tree_that_can_be_imported_is_measured() -> None:
    """Fails for a tree that is there and would be left out in silence."""
    assert set(measurable()) <= set(ALL)
    assert not measurable() or set(measurable()) == set(real_trees())

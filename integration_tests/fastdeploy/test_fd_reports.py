"""What users and dashboards are told of a hit stays true when the hit is taken back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pnode import PNode

PROMPT = list(range(100, 132))
Make = Callable[..., PNode]


def told(node: PNode, name: str) -> dict[str, int]:
    """Every field that says how much of a request came from the cache."""
    request = node.entries[name].request
    metrics = getattr(request, "metrics", None)
    fields = metrics if hasattr(metrics, "gpu_cache_token_num") else request
    return {
        "cached": request.num_cached_tokens,
        "gpu": fields.gpu_cache_token_num,
        "blocks": request.cache_info[0],
        "blocks to compute": request.cache_info[1],
    }


def take_back(node: PNode) -> None:
    """X is refused, Y was told a hit on it and computes everything."""
    node.preallocate("x", PROMPT)
    node.refuse("x")
    node.preallocate("y", PROMPT)
    node.accept("y")
    node.step()


def test_the_request_reports_no_hit_when_all_of_it_is_taken_back(applied: Any, node: Make) -> None:
    """Catches an answer that says 32 cached tokens for a prompt that was computed in full."""
    made = node()
    take_back(made)
    assert told(made, "y") == {"cached": 0, "gpu": 0, "blocks": 0, "blocks to compute": 8}


def test_the_request_reports_the_part_that_is_left_of_a_hit(applied: Any, node: Make) -> None:
    """Catches a correction that is all or nothing."""
    made = node(budget=14)
    made.preallocate("x", PROMPT)
    made.preallocate("y", PROMPT)
    made.accept("x")
    made.step()
    made.refuse("x")
    made.accept("y")
    made.step()
    assert told(made, "y") == {"cached": 12, "gpu": 12, "blocks": 3, "blocks to compute": 5}


def test_the_request_reports_what_it_skipped(applied: Any, node: Make) -> None:
    """Catches a publisher that starts behind others' blocks and reports no hit."""
    made = node()
    made.preallocate("r1", PROMPT)
    made.preallocate("r2", PROMPT)
    made.accept("r2")
    made.step()
    made.accept("r1")
    made.step()
    assert told(made, "r1") == {"cached": 28, "gpu": 28, "blocks": 7, "blocks to compute": 1}


def test_the_process_counters_never_decrease_and_come_out_true(tree: Any, applied: Any, node: Make) -> None:
    """Catches a Prometheus counter that goes down, which scrapers take for a restart, and one that stays too high."""
    names = ("prefix_cache_token_num", "prefix_gpu_cache_token_num")
    before = [tree.count(name) for name in names]
    seen = [before]
    made = node()
    take_back(made)
    seen.append([tree.count(name) for name in names])
    made.finish("y")
    for name in ("z", "v"):
        made.preallocate(name, PROMPT)
        made.accept(name)
        made.step()
        seen.append([tree.count(name) for name in names])
    for one, two in itertools.pairwise(seen):
        assert all(later >= earlier for earlier, later in zip(one, two, strict=True))
    # Three hits of 28 or, counted in whole blocks, 32 tokens were reported; the first was none.
    per_hit = 32 if tree.finding.facts["place"] == "cache_info" and tree.name == "2.3" else 28
    assert [end - start for start, end in zip(before, seen[-1], strict=True)] == [2 * per_hit] * 2


def test_the_managers_totals_lose_the_hit(applied: Any, node: Make) -> None:
    """Catches a hit ratio in the log and the gauges that includes hits taken back."""
    made = node()
    take_back(made)
    totals = made.cache.metrics
    assert (totals.matched_token_num, totals.total_gpu_matched_token_num, totals.hit_req_count) == (0, 0, 0)
    assert totals.req_count == 2


def test_a_hit_that_holds_is_reported_as_upstream_reports_it(tree: Any, node: Make) -> None:
    """Catches corrections where nothing was wrong."""
    reports = []
    for mode in ("eager", "safe"):
        with tree.fixed(mode):
            made = node()
            made.preallocate("x", PROMPT)
            made.accept("x")
            made.step()
            made.preallocate("y", PROMPT)
            made.accept("y")
            made.step()
            reports.append(told(made, "y"))
    assert reports[0] == reports[1]


def test_a_preempted_requests_second_lookup_is_corrected_where_it_was_reported(
    tree: Any, applied: Any, node: Make
) -> None:
    """Catches corrections of reports that were never made: a rescheduled request is not counted again from 2.5 on."""
    made = node(budget=14)
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.step()
    before = tree.count("prefix_cache_token_num")
    (name,) = made.preempt_all()
    made.reschedule(name)
    made.config.scheduler_config.max_num_batched_tokens = 64
    (chunk,) = made.step()
    assert (chunk.start, chunk.end) == (12, 32)
    assert made.entries["x"].request.num_cached_tokens == 12
    assert made.oracle.poisoned == 0
    reported_again = tree.finding.facts["place"] == "cache_info"
    assert told(made, "x")["gpu"] == (12 if reported_again else 0)
    assert reported_again or tree.count("prefix_cache_token_num") == before

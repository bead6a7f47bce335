"""A cache manager that fails while a request is published; a tree that changes meanwhile; deployments left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from pnode import Options, PNode

from kvmend_fixes.fastdeploy._frontier import is_open

PROMPT = list(range(100, 132))
Make = Callable[..., PNode]


def whole(node: PNode, free_ids: int) -> None:
    """The tree is as if nothing had been tried."""
    node.check()
    assert len(node.cache.node_id_pool) == free_ids
    known = set(node.cache.node_map)
    assert {child.node_id for child in node.cache.radix_tree_root.children.values()} <= known


def test_a_publication_that_fails_at_once_leaves_the_request_usable(
    applied: Any, node: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an exception that reaches the engine's fetch loop: the request would never be answered."""
    made = node()

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such image")

    ids = len(made.cache.node_id_pool)
    monkeypatch.setattr(made.cache, "mm_build_path", broken)
    with caplog.at_level(logging.WARNING, logger="kvmend.fastdeploy"):
        assert made.preallocate("x", PROMPT)
        assert made.preallocate("y", PROMPT)
    monkeypatch.undo()
    whole(made, ids)
    assert applied.errors == 2
    ours = [record.getMessage() for record in caplog.records if record.name == "kvmend.fastdeploy"]
    assert len(ours) == 1
    assert "ValueError: no such image" in ours[0]
    made.accept("x")
    made.step()
    made.accept("y")
    made.step()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_a_publication_that_fails_half_way_is_taken_out_of_the_tree(
    applied: Any, node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches nodes that stay in the tree although nobody owns them: their blocks would be free and cached at once."""
    made = node()
    ids = len(made.cache.node_id_pool)
    original = made.cache.get_block_hash_extra_keys
    calls = []

    def breaks(**kwargs: Any) -> Any:
        calls.append(kwargs)
        if kwargs["start_idx"] >= 16 and breaking:
            raise AssertionError("image out of range")
        return original(**kwargs)

    breaking: list[int] = []
    monkeypatch.setattr(made.cache, "get_block_hash_extra_keys", breaks)
    made.preallocate("short", PROMPT[:8])
    breaking.append(1)
    match = made.cache.mm_match_block
    monkeypatch.setattr(made.cache, "mm_match_block", lambda *args: _unbroken(breaking, match, *args))
    assert made.preallocate("x", PROMPT)
    breaking.clear()
    monkeypatch.undo()
    assert applied.errors == 1
    assert len(made.cache.node_map) == 2
    whole(made, ids - 2)
    for name in ("x", "short"):
        made.accept(name)
        made.step()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)
    assert len(made.cache.node_id_pool) == ids


def _unbroken(breaking: list[int], match: Any, *args: Any) -> Any:
    """Lookups work; only publication fails."""
    breaking.clear()
    try:
        return match(*args)
    finally:
        breaking.append(1)


def test_a_tree_that_grew_between_lookup_and_publication_is_left_alone(tree: Any, applied: Any, node: Make) -> None:
    """Catches a publication that takes the place of nodes somebody published meanwhile, and loses them."""
    if "no-publication" not in tree.finding.features:
        pytest.skip(f"{tree.name} publishes under the same lock as it looks up")
    made = node()
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.preempt_all()
    made.cache.can_allocate_gpu_blocks(96)
    made.reschedule("x")

    class Lock:
        """Lets the scheduler run when preallocation gives the lock back for the first time."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.armed = inner, True

        def __enter__(self) -> Any:
            return self.inner.__enter__()

        def __exit__(self, *error: Any) -> Any:
            done = self.inner.__exit__(*error)
            if self.armed:
                self.armed = False
                made.step()
            return done

    made.manager.lock = Lock(made.manager.lock)
    assert made.preallocate("y", PROMPT)
    assert applied.not_published == 1
    made.check()
    made.accept("y")
    made.step()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


# -- left exactly as they are ------------------------------------------------------------------------------------


def ours(node: PNode) -> list[str]:
    """Traces of the fix on a node."""
    return [name for name in vars(node.cache) if "kvmend" in name]


def test_a_node_without_prefix_caching_is_left_as_it_is(tree: Any, node: Make) -> None:
    """Catches publication where there is no tree to publish to."""
    runs = []
    for mode in ("off", "safe"):
        with tree.fixed(mode) if mode != "off" else _nothing():
            made = node(caching=False, budget=10)
            for name in ("x", "y"):
                made.preallocate(name, PROMPT)
                made.accept(name)
            for _ in range(8):
                made.step()
            runs.append([(chunk.name, chunk.start, chunk.end, chunk.table) for chunk in made.chunks])
            assert not ours(made)
            assert not made.cache.node_map
    assert runs[0] == runs[1]


def test_a_mixed_node_is_left_as_it_is(tree: Any, node: Make) -> None:
    """Catches wrappers that act by method and not by role."""
    runs = []
    for mode in ("off", "safe"):
        with tree.fixed(mode) if mode != "off" else _nothing():
            made = node(role="mixed", budget=24)
            for number, prompt in enumerate([PROMPT, PROMPT, PROMPT[:20]]):
                made.manager.add_request(tree.request(f"r{number}", list(prompt), {}))
            chunks = []
            for _ in range(5):
                scheduled = made.manager.schedule()
                batch = scheduled[0] if isinstance(scheduled, tuple) else scheduled
                chunks.append(
                    [
                        (task.request_id, task.prefill_start_index, task.prefill_end_index, tuple(task.block_tables))
                        for task in batch
                        if hasattr(task, "prefill_start_index")
                    ]
                )
            runs.append((chunks, sorted(made.cache.gpu_free_block_list), len(made.cache.node_map)))
            with pytest.raises(AssertionError):
                made.manager.preallocate_resource_in_p(tree.request("wrong", list(PROMPT), {}))
            assert not ours(made)
            assert chunks[0]
    assert runs[0] == runs[1]


def test_a_decode_node_is_left_as_it_is(tree: Any, node: Make) -> None:
    """Catches state on a node that never preallocates for prefill."""
    runs = []
    for mode in ("off", "safe"):
        with tree.fixed(mode) if mode != "off" else _nothing():
            made = node(role="decode")
            request = tree.request("r", list(PROMPT), {})
            assert made.manager.preallocate_resource_in_d(request)
            runs.append((list(request.block_tables), sorted(made.cache.gpu_free_block_list)))
            assert not ours(made)
    assert runs[0] == runs[1]


def test_the_new_cache_manager_is_left_as_it_is(tree: Any, applied: Any, node: Make) -> None:
    """Catches a fix that meddles with ENABLE_V1_KVCACHE_MANAGER=1, whose tree is another one."""
    made = node()
    made.manager.enable_cache_manager_v1 = True
    request = tree.request("x", list(PROMPT), {})
    if tree.name == "develop":
        # That manager's own methods are not on the old one; that they are asked for shows that nothing was diverted.
        with pytest.raises(AttributeError):
            made.manager.preallocate_resource_in_p(request)
    else:
        made.manager.preallocate_resource_in_p(request)
    assert not ours(made)
    assert applied.published == 0


def test_a_cache_manager_that_answers_to_every_name_is_none_of_ours(applied: Any, node: Make) -> None:
    """Catches state that is looked for and found on a stand-in for the cache manager."""
    made = node(role="mixed")
    made.manager.cache_manager = MagicMock(num_cpu_blocks=0)
    request = made.tree.request("x", list(PROMPT), {})
    assert made.manager._get_num_new_tokens(request, 8) == 8
    assert made.manager._prepare_prefill_task(request, 8) is request


def test_bookkeeping_is_one_mark_per_node(applied: Any, node: Make) -> None:
    """Catches tables that grow with requests: after any number of them the marks are those of the tree's nodes."""
    made = node()
    for number in range(200):
        made.preallocate(f"r{number}", list(range(1000 * number, 1000 * number + 32)))
        made.refuse(f"r{number}")
    open_nodes = [each for each in made.cache.node_map.values() if is_open(each)]
    assert 0 < len(open_nodes) <= Options().blocks
    (state,) = (getattr(made.cache, name) for name in ours(made))
    assert all(len(value) <= 3 for value in (state.debts, state.matched, state.agreed))


class _nothing:
    """No fix."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

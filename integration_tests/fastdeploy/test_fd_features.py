"""Images, speculative decoding, host memory, storage backends, preemption, aborts, resets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pnode import Image, PNode

PROMPT = list(range(100, 132))
Make = Callable[..., PNode]


def first_start(node: PNode, name: str) -> int:
    return next(chunk.start for chunk in node.chunks if chunk.name == name)


def serve(node: PNode, name: str, prompt: list[int], images: tuple[Image, ...] = ()) -> int:
    """Preallocates, accepts and computes a request; gives where it started."""
    assert node.preallocate(name, prompt, images)
    node.accept(name)
    while node.entries[name].state != "prefilled":
        node.step()
    return first_start(node, name)


# -- multimodal --------------------------------------------------------------------------------------------------


def test_the_same_text_with_another_image_is_no_hit(applied: Any, node: Make) -> None:
    """Catches publication that forgets the image hashes."""
    made = node(multimodal=True)
    made.preallocate("x", PROMPT, (Image(6, 8, 1),))
    made.preallocate("y", PROMPT, (Image(6, 8, 2),))
    assert made.entries["y"].hit == 4


def test_a_refused_multimodal_request_is_computed_by_the_next_one(applied: Any, node: Make) -> None:
    """Catches a frontier for text only."""
    made = node(multimodal=True)
    images = (Image(6, 8, 1), Image(20, 4, 2))
    made.preallocate("x", PROMPT, images)
    made.refuse("x")
    assert serve(made, "y", PROMPT, images) == 0
    assert serve(made, "z", PROMPT, images) == 28
    assert made.oracle.poisoned == 0


def test_no_chunk_starts_inside_an_image_that_must_not_be_cut(tree: Any, applied: Any, node: Make) -> None:
    """Catches a start lowered to a block boundary in the middle of an image."""
    if not hasattr(tree.ResourceManagerV1, "revert_chunked_mm_input"):
        pytest.skip(f"{tree.name} has no chunked multimodal input to disable")
    made = node(multimodal=True, whole_images=True, budget=18)
    images = (Image(10, 12, 1),)
    made.preallocate("x", PROMPT, images)
    made.preallocate("y", PROMPT, images)
    made.accept("x")
    made.step()
    made.refuse("x")
    made.accept("y")
    made.step()
    # Blocks 0 to 3 are computed; block 4 starts at token 16, inside the image that starts in block 2.
    assert first_start(made, "y") == 8
    assert made.oracle.poisoned == 0


def test_a_publisher_does_not_skip_into_an_image_that_must_not_be_cut(tree: Any, applied: Any, node: Make) -> None:
    """Catches the upward rule doing what the downward rule must not."""
    if not hasattr(tree.ResourceManagerV1, "revert_chunked_mm_input"):
        pytest.skip(f"{tree.name} has no chunked multimodal input to disable")
    made = node(multimodal=True, whole_images=True, budget=18)
    images = (Image(10, 12, 1),)
    made.preallocate("x", PROMPT, images)
    made.preallocate("y", PROMPT, images)
    made.accept("y")
    made.step()
    made.refuse("y")
    made.accept("x")
    made.step()
    assert first_start(made, "x") == 8
    assert made.oracle.poisoned == 0


# -- speculative decoding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserve", [0, 1, 2])
def test_the_extra_block_of_speculative_decoding_is_neither_lost_nor_read(
    applied: Any, node: Make, reserve: int
) -> None:
    """Catches accounting that counts blocks from where the request started."""
    made = node(speculative="mtp", reserve=reserve, budget=10)
    made.preallocate("x", PROMPT)
    made.refuse("x")
    assert serve(made, "y", PROMPT) == 0
    assert serve(made, "z", PROMPT) == 28
    made.check()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


# -- host memory -------------------------------------------------------------------------------------------------


def fill(node: PNode) -> None:
    """Requests that push everything else off the GPU."""
    for number in range(4):
        serve(node, f"filler{number}", list(range(1000 * (number + 1), 1000 * (number + 1) + 40)))
        node.finish(f"filler{number}")


def test_a_node_swapped_out_uncovered_comes_back_uncovered(tree: Any, applied: Any, node: Make) -> None:
    """Catches coverage by block id: the node returns with another block, and with garbage."""
    made = node(blocks=24, cpu_blocks=64)
    made.preallocate("x", PROMPT)
    made.refuse("x")
    fill(made)
    assert [each for each in made.cache.node_map.values() if each.cache_status == tree.CacheStatus.CPU]
    made.preallocate("y", PROMPT)
    assert made.entries["y"].hit == 32
    made.accept("y")
    made.step()
    assert first_start(made, "y") == 0
    assert made.oracle.poisoned == 0


def test_a_node_swapped_out_covered_comes_back_covered(applied: Any, node: Make) -> None:
    """Catches a frontier that gives up hits on host memory."""
    made = node(blocks=24, cpu_blocks=64)
    serve(made, "x", PROMPT)
    made.finish("x")
    fill(made)
    assert serve(made, "y", PROMPT) == 28
    assert made.oracle.poisoned == 0


# -- storage backends --------------------------------------------------------------------------------------------


def needs_storage(tree: Any) -> None:
    if "storage" not in tree.finding.features:
        pytest.skip(f"{tree.name} has no storage backends")


def forget(node: PNode) -> None:
    """Evicts everything that nobody holds."""
    node.cache.can_allocate_gpu_blocks(node.options.blocks)


def test_a_request_that_ends_before_it_is_computed_stores_nothing_uncovered(
    tree: Any, applied: Any, node: Make
) -> None:
    """Catches garbage written under a good key, where every node of the cluster will find it."""
    needs_storage(tree)
    made = node(storage="mooncake", budget=14)
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.step()
    made.finish("x")
    assert len(made.oracle.store) == 3
    made.preallocate("y", PROMPT)
    made.accept("y")
    made.finish("y")
    assert len(made.oracle.store) == 3
    assert applied.kept_from_storage == 2


def test_an_attention_store_is_not_told_of_a_prompt_that_is_not_all_computed(
    tree: Any, applied: Any, node: Make
) -> None:
    """Catches an index of all the prompt's tokens beside the few blocks that are written."""
    needs_storage(tree)
    made = node(storage="attention_store", budget=14)
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.step()
    made.finish("x")
    assert made.oracle.store == {}


def test_blocks_fetched_from_storage_are_hits(tree: Any, applied: Any, node: Make) -> None:
    """Catches fetched blocks that count as open because they enter the tree at preallocation."""
    needs_storage(tree)
    made = node(storage="mooncake")
    serve(made, "x", PROMPT)
    made.finish("x")
    forget(made)
    made.preallocate("y", PROMPT)
    made.preallocate("z", PROMPT)
    assert (made.entries["y"].hit, made.entries["z"].hit) == (32, 32)
    made.refuse("y")
    made.accept("z")
    made.step()
    assert first_start(made, "z") == 28
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_a_preempted_request_keeps_the_blocks_it_fetched_from_storage(tree: Any, applied: Any, node: Make) -> None:
    """Catches fetched blocks that are lost when the request has to start before them."""
    needs_storage(tree)
    made = node(storage="mooncake", budget=64)
    serve(made, "x", PROMPT)
    made.finish("x")
    forget(made)
    assert not made.cache.node_map
    made.preallocate("y", PROMPT[:12])
    made.accept("y")
    made.preempt_all()
    forget(made)
    made.reschedule("y")
    made.step()
    made.drain()
    made.check()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_blocks_fetched_again_behind_uncovered_ones_are_not_lost(tree: Any, applied: Any, node: Make) -> None:
    """Catches fetched blocks that never enter the tree because the request starts before them."""
    needs_storage(tree)
    other = node(storage="mooncake")
    serve(other, "x", PROMPT)
    other.finish("x")
    made = node(storage="mooncake", budget=8)
    made.preallocate("holder", PROMPT[:16])
    made.preallocate("z", PROMPT)
    made.accept("z")
    made.preempt_all()
    forget(made)
    made.oracle.store.update(other.oracle.store)
    made.reschedule("z")
    while made.entries["z"].state != "prefilled":
        made.step()
        made.check()
    assert first_start(made, "z") == 0
    made.drain()
    made.check()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


# -- generated tokens --------------------------------------------------------------------------------------------


def test_a_block_that_ends_with_the_sampled_token_is_computed_by_whoever_hits_it(
    tree: Any, applied: Any, node: Make
) -> None:
    """Catches output caching on a prefill node: the KV of its one sampled token is never computed there."""
    if "output-caching" not in tree.finding.features:
        pytest.skip(f"{tree.name} publishes no block that ends with the last sampled token")
    made = node(output_caching=True)
    prompt = PROMPT[:31]
    serve(made, "x", prompt)
    made.entries["x"].request.output_token_ids.append(7)
    made.manager.cache_output_tokens(made.entries["x"].request)
    made.finish("x")
    assert serve(made, "y", [*prompt, 7, 8, 9]) == 28
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


# -- whole prompts -----------------------------------------------------------------------------------------------


def test_with_chunked_prefill_disabled_a_taken_back_prompt_is_one_chunk(
    applied: Any, node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a lowered start that makes a second chunk."""
    monkeypatch.setenv("FD_DISABLE_CHUNKED_PREFILL", "1")
    made = node(budget=32)
    made.preallocate("x", PROMPT)
    made.refuse("x")
    serve(made, "y", PROMPT)
    assert [(chunk.start, chunk.end) for chunk in made.chunks] == [(0, 32)]
    made.preempt_all()
    made.reschedule("y")
    made.step()
    assert (made.chunks[-1].start, made.chunks[-1].end) == (28, 32)
    assert made.oracle.poisoned == 0


# -- ends of all kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["preallocated", "accepted", "half", "prefilled", "preempted", "waiting"])
def test_an_abort_at_any_stage_leaves_no_trap_and_loses_no_block(applied: Any, node: Make, stage: str) -> None:
    """Catches blocks that stay published although the request that was to compute them is gone."""
    made = node(budget=14)
    made.preallocate("x", PROMPT)
    if stage != "preallocated":
        made.accept("x")
    if stage in ("half", "prefilled", "preempted", "waiting"):
        made.step()
    if stage == "prefilled":
        made.step()
        made.step()
    if stage in ("preempted", "waiting"):
        made.preempt_all()
    if stage == "waiting":
        made.reschedule("x")
    made.preallocate("reader", PROMPT)
    reader = made.entries.pop("reader")
    made.drain()
    made.entries["reader"] = reader
    made.accept("reader")
    made.step()
    whole = {"preallocated": 0, "accepted": 0, "prefilled": 28}.get(stage, 12)
    assert first_start(made, "reader") == whole
    made.drain()
    made.check()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_a_half_prefilled_request_that_is_preempted_goes_on_behind_what_it_computed(applied: Any, node: Make) -> None:
    """Catches a preempted request that trusts all of its own publication, computed or not."""
    made = node(budget=14)
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.step()
    made.preempt_all()
    made.reschedule("x")
    while made.entries["x"].state != "prefilled":
        made.step()
    assert [chunk.start for chunk in made.chunks] == [0, 12, 26]
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_a_preempted_request_that_hits_as_much_as_it_had_computed_is_not_taken_at_its_word(
    applied: Any, node: Make
) -> None:
    """Catches a short cut for requests that go on where they stopped: this one only seems to."""
    made = node(budget=28)
    made.preallocate("x", PROMPT)
    made.accept("x")
    made.step()
    made.preempt_all()
    forget(made)
    made.preallocate("y", PROMPT)
    made.refuse("y")
    made.reschedule("x")
    made.step()
    assert [chunk.start for chunk in made.chunks] == [0, 0]
    assert made.oracle.poisoned == 0


def test_preempting_everybody_at_once_poisons_nobody(applied: Any, node: Make) -> None:
    """Catches marks that are lost with the requests: a weight update preempts the whole node."""
    made = node(budget=20)
    for number in range(4):
        made.preallocate(f"r{number}", [*PROMPT[: 8 * (number + 1)], *range(number)])
        made.accept(f"r{number}")
    made.step()
    for name in made.preempt_all():
        made.reschedule(name)
    for _ in range(12):
        made.step()
        made.check()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)


def test_a_hit_from_before_a_reset_is_not_used_after_it(applied: Any, node: Make) -> None:
    """Catches a request that was preallocated before `clear_prefix_cache` and reads blocks of the tree that is gone."""
    made = node()
    made.preallocate("x", PROMPT)
    made.preallocate("y", PROMPT)
    made.cache.reset()
    made.accept("y")
    made.step()
    assert first_start(made, "y") == 0
    assert made.oracle.poisoned == 0


def test_a_tree_that_was_reset_is_published_to_again(applied: Any, node: Make) -> None:
    """Catches state that survives the tree it speaks of."""
    made = node()
    serve(made, "x", PROMPT)
    made.finish("x")
    made.cache.reset()
    made.preallocate("y", PROMPT)
    made.preallocate("z", PROMPT)
    assert (made.entries["y"].hit, made.entries["z"].hit) == (0, 32)
    for name in ("z", "y"):
        made.accept(name)
        made.step()
    made.drain()
    assert (made.oracle.poisoned, made.lost()) == (0, 0)

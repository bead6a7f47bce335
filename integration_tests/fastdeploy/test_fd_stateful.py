"""Every order of events that hypothesis can think of."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pnode import Image, Options, PNode

#: Prompts are beginnings of these, some with a tail of their own: much is shared, at every depth.
STEMS = [list(range(40)), [*range(18), *range(200, 222)]]


def machine(tree: Any, options: Options) -> type[RuleBasedStateMachine]:
    class Node(RuleBasedStateMachine):
        """One prefill node."""

        preallocated = Bundle("preallocated")

        def __init__(self) -> None:
            super().__init__()
            self.node = PNode(tree, options)
            self.serial = 0

        def running(self, state: str) -> list[str]:
            return [name for name, entry in self.node.entries.items() if entry.state == state]

        @rule(
            target=preallocated,
            stem=st.sampled_from(STEMS),
            length=st.sampled_from([40, 36, 23, 12, 5, 1]),
            own=st.integers(0, 3),
            image=st.integers(0, 2),
            times=st.integers(1, 3),
        )
        def preallocate(self, stem: list[int], length: int, own: int, image: int, times: int) -> Any:
            images = (Image(5, 9, image),) if options.multimodal and image and length > 14 else ()
            names = []
            for _ in range(times):
                self.serial += 1
                names.append(f"r{self.serial}")
                self.node.preallocate(names[-1], [*stem[:length], *range(1000 * own, 1000 * own + 2 * own)], images)
            return multiple(*names)

        @rule(name=consumes(preallocated))
        def accept(self, name: str) -> None:
            if name in self.node.entries:
                self.node.accept(name)

        @rule(name=consumes(preallocated))
        def refuse(self, name: str) -> None:
            if name in self.node.entries:
                self.node.refuse(name)

        @precondition(lambda self: self.running("running") or self.running("waiting"))
        @rule(budget=st.sampled_from([64, 16, 8, 7, 4, 3, 1]), steps=st.integers(1, 3))
        def step(self, budget: int, steps: int) -> None:
            self.node.config.scheduler_config.max_num_batched_tokens = budget
            for _ in range(steps):
                self.node.step()

        @precondition(lambda self: self.running("prefilled"))
        @rule(data=st.data())
        def finish(self, data: st.DataObject) -> None:
            self.node.finish(data.draw(st.sampled_from(self.running("prefilled"))))

        @precondition(lambda self: self.running("running"))
        @rule(data=st.data(), really=st.booleans())
        def abort(self, data: st.DataObject, really: bool) -> None:
            if really:
                self.node.refuse(data.draw(st.sampled_from(self.running("running"))))

        @precondition(lambda self: self.running("running"))
        @rule(really=st.sampled_from([False, False, False, True]))
        def preempt(self, really: bool) -> None:
            if really:
                self.node.preempt_all()

        @precondition(lambda self: self.running("preempted"))
        @rule(data=st.data())
        def reschedule(self, data: st.DataObject) -> None:
            self.node.reschedule(data.draw(st.sampled_from(self.running("preempted"))))

        @invariant()
        def nobody_reads_what_was_not_computed(self) -> None:
            assert self.node.oracle.poisoned == 0, self.node.oracle.first_poisoned

        @invariant()
        def no_block_is_free_twice_or_free_and_in_use(self) -> None:
            self.node.check()

        def teardown(self) -> None:
            self.node.drain()
            self.node.check()
            lost = self.node.lost() if not options.cpu_blocks else 0
            self.node.close()
            assert lost == 0

    return Node


def run(tree: Any, options: Options, examples: int) -> None:
    run_state_machine_as_test(
        machine(tree, options),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_order_of_events_poisons_a_read_or_loses_a_block(tree: Any, applied: Any) -> None:
    """500 runs of up to 30 events each, with a pool so small that nodes are evicted all the time."""
    run(tree, Options(blocks=40, slots=5), 500)
    assert applied.taken_back > 100
    assert applied.skipped_ahead > 10
    assert applied.errors == 0


def test_no_order_of_events_poisons_a_read_with_host_memory(tree: Any, applied: Any) -> None:
    """The same with nodes that are swapped out and back."""
    run(tree, Options(blocks=36, slots=4, cpu_blocks=64), 100)
    assert applied.errors == 0


def test_no_order_of_events_poisons_a_read_with_images_that_must_not_be_cut(tree: Any, applied: Any) -> None:
    """The same with multimodal prompts, where a start inside an image moves back to its beginning."""
    run(tree, Options(blocks=40, slots=5, multimodal=True, whole_images=True), 100)
    assert applied.errors == 0

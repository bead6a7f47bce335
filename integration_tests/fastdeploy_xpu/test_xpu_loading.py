"""The fix arrives in a process before FastDeploy's XPU runner does, or without it ever coming."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from xputrees import run

from support import xpu_double

#: Arms the fix as the plugin loader does; the doubles are in no table, so the probe alone decides.
ARM = """
import dataclasses, json, logging, sys
from kvmend import applier, hooks
from kvmend.journal import JOURNAL
from kvmend_fixes.fastdeploy.xpu_kv_cache import FIX
fix = dataclasses.replace(FIX, fingerprints="")
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
FIX.framework.log().addHandler(Keep())
FIX.framework.log().setLevel(logging.INFO)
def arm():
    result = applier.apply(fix)
    if str(result.outcome) == "armed":
        hooks.arm(fix.id, JOURNAL.entries[fix.id].plan.sites, lambda settled: None)
    return str(result.outcome)
def outcome():
    return str(JOURNAL.entries[fix.id].result.outcome)
def counters():
    return JOURNAL.entries[fix.id].counters.as_dict()
"""


def told(snippet: str, tree: str, folder: Path, **environment: str) -> Any:
    """What a process that runs a snippet on a double prints, as JSON."""
    path = xpu_double.write(folder, tree)
    answer = run([sys.executable, "-c", ARM + textwrap.dedent(snippet)], path, folder, **environment)
    return json.loads(answer.splitlines()[-1])


def test_planning_imports_no_part_of_fastdeploy(tmp_path: Path) -> None:
    """Fails for a probe that imports what it judges: a process that never has a runner would pay for it."""
    snippet = """
    before = set(sys.modules)
    ended = arm()
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(json.dumps([ended, sorted(new & {"fastdeploy", "paddle", "numpy"})]))
    """
    assert told(snippet, "like-2.5", tmp_path) == ["armed", []]


def test_a_process_without_an_xpu_runner_keeps_everything_as_it_is(tmp_path: Path) -> None:
    """Fails for sites outside the runner's module: a GPU worker imports the proposer, too."""
    snippet = """
    arm()
    import fastdeploy.spec_decode.mtp as mtp, fastdeploy.engine.engine, fastdeploy.cache_manager.prefix_cache_manager
    wrapped = [
        f"{name}.{attribute}"
        for name, module in sys.modules.items() if name.startswith("fastdeploy")
        for held in vars(module).values() if isinstance(held, type)
        for attribute, value in vars(held).items() if hasattr(value, "__kvmend__")
    ]
    print(json.dumps([outcome(), wrapped]))
    """
    assert told(snippet, "like-2.5", tmp_path) == ["armed", []]


def test_the_runner_may_be_imported_long_after_the_plugin(tmp_path: Path) -> None:
    snippet = """
    arm()
    import fastdeploy.envs, fastdeploy.config
    middle = outcome()
    from fastdeploy.worker.xpu_model_runner import XPUModelRunner
    print(json.dumps([middle, outcome(), hasattr(XPUModelRunner.initialize_kv_cache, "__kvmend__")]))
    """
    assert told(snippet, "like-2.5", tmp_path) == ["armed", "applied", True]


def test_the_worker_alone_decides_without_the_engine_s_modules(tmp_path: Path) -> None:
    """Fails for a decision that asks the transfer manager's module instead of its source."""
    snippet = """
    from types import SimpleNamespace as S
    arm()
    import fastdeploy.worker.xpu_model_runner as worker, fastdeploy.inter_communicator as signals
    import numpy
    ready = numpy.zeros([1], numpy.int32)
    made, joined = [], []
    signals.IPCSignal = worker.IPCSignal = lambda **given: S(value=ready)
    ready[0] = 1
    worker.paddle.full = lambda **given: given
    worker.set_data_ipc = lambda tensor, name: made.append(name)
    worker.share_external_data = lambda tensor, name, shape, ipc: joined.append(name)
    caching = S(num_cpu_blocks=8, kvcache_storage_backend=None, enable_prefix_caching=True)
    config = S(cache_config=caching, scheduler_config=S(splitwise_role="mixed"))
    runner = object.__new__(worker.XPUModelRunner)
    vars(runner).update(
        fd_config=config, cache_config=caching, scheduler_config=config.scheduler_config, share_inputs={},
        parallel_config=S(tensor_parallel_size=1, local_engine_worker_queue_port=1), local_rank=0, device_id=0,
        model_config=S(num_hidden_layers=2, dtype="bfloat16"), num_gpu_blocks=4,
        attn_backends=[S(get_kv_cache_shape=lambda max_num_blocks: ([4], [4]))],
    )
    for _time in range(2):
        runner.initialize_kv_cache()
    engine = [name for name in sys.modules if name.startswith(("fastdeploy.engine", "fastdeploy.cache_manager"))]
    said = [line for line in lines if "KV tensors of the" in line]
    print(json.dumps([len(made), len(joined), engine, counters()["suppressed"], said]))
    """
    made, joined, engine, suppressed, said = told(snippet, "like-2.5", tmp_path)
    assert (made, joined, engine, suppressed) == (0, 8, [], 2)
    assert len(said) == 1, "the decision is logged once, with its reason"
    for part in ("attaches", "the transfer manager creates", "cpu-blocks-or-storage", "num_cpu_blocks 8"):
        assert part in said[0]
    assert "without kvmend it would create too" in said[0]


@pytest.mark.parametrize(("manager", "expected"), [("0", [0, 1]), ("1", [4, 0])])
def test_with_the_v1_cache_manager_nothing_is_led(manager: str, expected: list[int], tmp_path: Path) -> None:
    """Fails for a fix that knows better than the V1 cache manager, which launches no transfer manager at all."""
    snippet = """
    from kvmend_fixes.proofs._xpu_rig import Rig, Setup
    import os
    rig = Rig()
    arm()
    import fastdeploy.envs as envs
    envs.ENABLE_V1_KVCACHE_MANAGER = int(os.environ["TEST_V1_MANAGER"])
    started = rig.start(Setup(cpu_blocks=8))
    made = [name for name, processes in started.creators.items() if "runner 0" in processes]
    print(json.dumps([len(made), counters()["suppressed"]]))
    """
    assert told(snippet, "like-2.5", tmp_path, TEST_V1_MANAGER=manager) == expected


def test_a_proposer_with_a_method_of_its_own_is_left_alone(tmp_path: Path) -> None:
    """Fails for a lead of a decision that nobody has read."""
    snippet = """
    from kvmend_fixes.proofs._xpu_rig import Rig, Setup
    rig = Rig()
    arm()
    class Own(rig.mtp.MTPProposer):
        def initialize_kv_cache(self, main_model_num_blocks, profile=False):
            pass
    kept = rig.mtp.MTPProposer
    runner = object.__new__(rig.worker.XPUModelRunner)
    runner.fd_config, runner.speculative_method = None, "mtp"
    runner._init_speculative_proposer()
    led = "initialize_kv_cache" in vars(runner.proposer)
    rig.mtp.MTPProposer = Own
    runner._init_speculative_proposer()
    print(json.dumps([led, "initialize_kv_cache" in vars(runner.proposer)]))
    """
    assert told(snippet, "like-2.5", tmp_path) == [True, False]


def test_a_failure_of_the_original_is_the_original_s(tmp_path: Path) -> None:
    """Fails for a lead that swallows what goes wrong, or counts a creator suppressed that was not."""
    snippet = """
    from kvmend_fixes.proofs._xpu_rig import Rig, Setup
    rig = Rig()
    arm()
    def full(*args, **kwargs):
        raise MemoryError("device")
    import kvmend_fixes.proofs._xpu_standins as standins
    standins.StandIns.attach = full
    try:
        rig.start(Setup(cpu_blocks=8))
        raised = None
    except MemoryError as error:
        raised = str(error)
    print(json.dumps([raised, counters()["suppressed"]]))
    """
    assert told(snippet, "like-2.5", tmp_path) == ["device", 0]


def test_a_profile_run_is_known_however_it_is_called(tmp_path: Path) -> None:
    """Fails for a proposer whose number of blocks is taken for `profile`, and for a profile run that is led."""
    snippet = """
    from types import SimpleNamespace as S
    from kvmend_fixes.fastdeploy import xpu_kv_cache
    from kvmend.api import Context, Counters
    import fastdeploy.envs
    xpu_kv_cache.await_creator = lambda *args: None
    facts = {"transfer_manager": ["mixed+cpu+prefix"], "messager": [], "generation": "cpu-blocks"}
    facts |= {"runner": ["mixed+cpu+prefix"], "runner_signal": "port", "proposer": [], "proposer_signal": "port"}
    context = Context(
        mode="1", features=frozenset(), facts=facts, counters=Counters(FIX.counters), log=logging.getLogger("x")
    )
    def original(runner, *args, **kwargs):
        return runner.fd_config.scheduler_config.splitwise_role
    caching = S(num_cpu_blocks=8, kvcache_storage_backend=None, enable_prefix_caching=True)
    runner = S(fd_config=S(cache_config=caching, scheduler_config=S(splitwise_role="mixed")))
    own = xpu_kv_cache._deciding(original, context, whose="runner", profile_at=0)
    facts["proposer"] = ["mixed+cpu+prefix"]
    class Proposer:
        def initialize_kv_cache(self, main_model_num_blocks, profile=False):
            return self.fd_config.scheduler_config.splitwise_role
    Proposer.initialize_kv_cache.__module__ = "fastdeploy.spec_decode.mtp"
    proposer = Proposer()
    proposer.fd_config = runner.fd_config
    runner.proposer = proposer
    xpu_kv_cache.guard_proposer(lambda runner: None, context)(runner)
    print(json.dumps([
        own(runner), own(runner, True), own(runner, profile=True), own(runner, False),
        proposer.initialize_kv_cache(40), proposer.initialize_kv_cache(40, True),
        proposer.initialize_kv_cache(main_model_num_blocks=40, profile=True), proposer.initialize_kv_cache(40, False),
    ]))
    """
    led, kept = "prefill", "mixed"
    assert told(snippet, "like-2.5", tmp_path) == [led, kept, kept, led, led, kept, kept, led]

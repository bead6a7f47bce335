"""fastdeploy-xpu-kv-cache: exactly one process creates the KV tensors on XPU."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from kvmend.api import (
    AFFECTED,
    FIXED,
    NOT_AFFECTED,
    UNKNOWN,
    Body,
    Context,
    Finding,
    Fix,
    Site,
    Sources,
)
from kvmend_fixes.fastdeploy import FASTDEPLOY
from kvmend_fixes.fastdeploy._launch_rule import (
    MESSAGER,
    PREFIX_CACHE,
    SERVICE,
    TO_ATTACH,
    TO_CREATE,
    TRANSFER,
    Creates,
    LaunchRule,
    generation_of,
    read_attach_rule,
    read_launch_rule,
)
from kvmend_fixes.fastdeploy._xpu_source import CONFIGURATIONS, Unreadable
from kvmend_fixes.fastdeploy._xpu_steer import await_creator, configuration_of, describe, led

WHY = """\
Symptom: on XPU the KV tensors exist twice, in two processes, and memory runs out; in other configurations the worker
waits at start, for ever and in silence, for KV tensors that nobody creates.

Trigger: with swap space (`num_cpu_blocks` > 0) or a storage backend a transfer manager runs beside the XPU worker.
Which of the two creates the KV tensors is decided twice, by the command line the transfer manager is launched with and
by a condition of the worker's own, and the two do not agree: 2.4 - 2.6 have configurations with two creators. The
condition of PR 7420 is right for the launch rule of its day, with prefix caching; without prefix caching, on 2.6, and
after PR 8046 there are configurations where it leaves no creator."""

HOW = """\
The installed launch rule is read off the source: when the engine starts the cache service, when that launches a
transfer manager and a cache messager, when the transfer manager is told to create, whether it does so when told. The
runner then creates exactly where nobody else does. Its own `initialize_kv_cache` runs as it is; only where its
condition would say otherwise does it get to see a configuration that makes it say so, for the length of that one call
and without any object being changed. Profile runs always create and pass through untouched. The MTP proposer's
`initialize_kv_cache` is led in the same way.

Where the runner attaches, the ready signal is awaited here first: a log line every 30 s names the rule, the
configuration and the process that should have created; under KVMEND_STRICT=1 the process stops after 10 minutes.

Safe because: a launch rule that is none of the known ones, or cannot be read, means hands off, and the reason names
file and line; which signal is set and awaited, names, shapes and types of the tensors stay the original's; with the V1
cache manager (`ENABLE_V1_KVCACHE_MANAGER`) nothing is led."""

REMOVE_WHEN = """\
The server runs a FastDeploy whose XPU runner follows the launch rule itself in every configuration; kvmend then says
already_fixed or not_affected."""

_RUNNER = "fastdeploy.worker.xpu_model_runner"
_MTP = "fastdeploy.spec_decode.mtp"

#: The runner can have an MTP proposer, which has KV tensors of its own.
MTP = "mtp"


def decide_creator(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `XPUModelRunner.initialize_kv_cache(profile=False)`: creates where nobody else does."""
    return _deciding(original, context, whose="runner", profile_at=0)


def guard_proposer(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `XPUModelRunner._init_speculative_proposer()`: the proposer's KV tensors have one creator, too.

    The proposer's module may never be imported, so its instance is led, not its class.
    """

    @functools.wraps(original)
    def _init_speculative_proposer(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        proposer: Any = getattr(runner, "proposer", None)
        initialize = getattr(type(proposer), "initialize_kv_cache", None)
        # Only the method that was read: a subclass with another one decides in a way nobody knows.
        if initialize is not None and initialize.__module__ == _MTP and "proposer" in context.facts:
            deciding = _deciding(initialize, context, whose="proposer", profile_at=1)
            proposer.initialize_kv_cache = types.MethodType(deciding, proposer)
        return result

    return _init_speculative_proposer


def _deciding(original: Callable[..., Any], context: Context, *, whose: str, profile_at: int) -> Callable[..., Any]:
    """`original` led by the launch rule; `profile_at` is the position of `profile` after the instance."""
    facts, counters = context.facts, context.counters
    by_transfer, by_messager = frozenset(facts["transfer_manager"]), frozenset(facts["messager"])
    own, suffix = frozenset(facts[whose]), str(facts[f"{whose}_signal"])
    said: set[str] = context.shared.setdefault("said", set())

    @functools.wraps(original)
    def initialize_kv_cache(runner: Any, *args: Any, **kwargs: Any) -> Any:
        profile = kwargs["profile"] if "profile" in kwargs else len(args) > profile_at and args[profile_at]
        if profile or _v1_manager():
            return original(runner, *args, **kwargs)
        name = configuration_of(runner).name
        creator = "the transfer manager" if name in by_transfer else "the cache messager" if name in by_messager else ""
        creates, would_create = not creator, name in own
        decision = f"{whose}: {'creates' if creates else f'attaches, {creator} creates'}"
        if decision not in said:
            said.add(decision)
            context.log.info(
                "kvmend: KV tensors of the %s (launch rule: transfer manager %s; %s)%s",
                decision,
                facts["generation"],
                describe(runner),
                "" if creates == would_create else "; without kvmend it would " + ("wait" if creates else "create too"),
            )
        if not creates:
            await_creator(runner, suffix, f"{creator} (launch rule: {facts['generation']})", context.log, counters)
        if creates == would_create:
            return original(runner, *args, **kwargs)
        result = original(led(runner, TO_CREATE if creates else TO_ATTACH), *args, **kwargs)
        if creates:
            counters.supplied += 1
        else:
            counters.suppressed += 1
        return result

    return initialize_kv_cache


def _v1_manager() -> bool:
    """The V1 cache manager starts no cache service and has rules of its own; none of its KV tensors are ours."""
    from fastdeploy import envs

    return bool(getattr(envs, "ENABLE_V1_KVCACHE_MANAGER", 0))


def probe(sources: Sources) -> Finding:
    """Counts the creators of every configuration from the source alone."""
    body = sources.body(_RUNNER, "XPUModelRunner.initialize_kv_cache")
    if body is None:
        return Finding(state=NOT_AFFECTED, reason="there is no XPU runner, hence no second creator")
    try:
        rule, runner = read_launch_rule(sources), read_attach_rule(body)
        generation = generation_of(rule)
        if generation is None:
            return Finding(state=UNKNOWN, reason=f"no known generation launches like this: {_where(rule.others)}")
        features, facts = {f"launch-{generation}"}, _facts(rule, generation)
        facts |= {"runner": sorted(runner.creates), "runner_signal": runner.signal_suffix}
        wrong = _wrong(runner.creates, rule)
        if sources.body(_RUNNER, "XPUModelRunner._init_speculative_proposer") is not None:
            draft = sources.body(_MTP, "MTPProposer.initialize_kv_cache")
            if draft is None:
                return Finding(state=UNKNOWN, reason=f"there is no MTPProposer.initialize_kv_cache in {_MTP}")
            proposer = read_attach_rule(draft)
            features.add(MTP)
            facts |= {"proposer": sorted(proposer.creates), "proposer_signal": proposer.signal_suffix}
            wrong |= {f"MTP {name}": count for name, count in _wrong(proposer.creates, rule).items()}
    except (Unreadable, LookupError) as error:
        return Finding(state=UNKNOWN, reason=error.args[0])
    if wrong:
        return Finding(
            state=AFFECTED,
            reason=f"the transfer manager follows the launch rule {generation!r}, the worker another: {_told(wrong)}",
            features=frozenset(features),
            facts=facts,
        )
    if not rule.transfer:
        reason = "the transfer manager never creates KV tensors, and the runner creates wherever no messager does"
        return Finding(state=NOT_AFFECTED, reason=reason, features=frozenset(features), facts=facts)
    reason = f"the runner itself follows the transfer manager's launch rule ({generation})"
    return Finding(state=FIXED, reason=reason, features=frozenset(features), facts=facts)


def _facts(rule: LaunchRule, generation: str) -> dict[str, Any]:
    return {"generation": generation, "transfer_manager": sorted(rule.transfer), "messager": sorted(rule.messager)}


def _wrong(creates: Creates, rule: LaunchRule) -> dict[str, int]:
    """Configurations that FastDeploy starts with and whose number of creators is not one."""
    counts = {
        each.name: (each.name in creates) + (each.name in rule.transfer) + (each.name in rule.messager)
        for each in CONFIGURATIONS
        if each.possible
    }
    return {name: count for name, count in counts.items() if count != 1}


def _told(wrong: dict[str, int]) -> str:
    """As in "2 creators of the KV tensors with mixed+cpu+prefix; no creator of the KV tensors with MTP mixed+cpu"."""
    parts = []
    for count in sorted(set(wrong.values()), reverse=True):
        names = ", ".join(sorted(name for name, found in wrong.items() if found == count))
        parts.append(f"{count or 'no'} creator{'s' if count > 1 else ''} of the KV tensors with {names}")
    return "; ".join(parts)


def _where(creates: Creates) -> str:
    return ", ".join(sorted(creates)) or "nowhere"


FIX = Fix(
    id="fastdeploy-xpu-kv-cache",
    switch="KVMEND_FASTDEPLOY_XPU_KV_CACHE",
    framework=FASTDEPLOY,
    summary="Exactly one process creates the KV tensors on XPU, in every configuration.",
    why=WHY,
    how=HOW,
    remove_when=REMOVE_WHEN,
    upstream=(
        "https://github.com/PaddlePaddle/FastDeploy/pull/7420",
        "https://github.com/PaddlePaddle/FastDeploy/pull/8046",
        "https://github.com/PaddlePaddle/FastDeploy/pull/7471",
        "https://github.com/PaddlePaddle/FastDeploy/pull/4584",
    ),
    releases="2.4 – 2.6",
    sites=(
        Site(module=_RUNNER, qualname="XPUModelRunner.initialize_kv_cache", wrap=decide_creator),
        Site(
            module=_RUNNER,
            qualname="XPUModelRunner._init_speculative_proposer",
            wrap=guard_proposer,
            features=frozenset({MTP}),
        ),
    ),
    bodies=(
        Body(module=PREFIX_CACHE, qualname="PrefixCacheManager.launch_cache_manager"),
        Body(module=SERVICE, qualname="EngineService.start_cache_service"),
        Body(module=TRANSFER, qualname="CacheTransferManager._init_gpu_cache"),
        Body(module=MESSAGER, qualname="main"),
        Body(module=_MTP, qualname="MTPProposer.initialize_kv_cache"),
    ),
    probe=probe,
    counters={
        "suppressed": "creators suppressed, because another process creates",
        "supplied": "creators supplied, where nobody else creates",
        "awaited": "waits for another process's KV tensors",
        "overdue": "warnings of such a wait, one every 30 s",
    },
    fingerprints="kvmend_fixes.fingerprints:fastdeploy-xpu-kv-cache.json",
    proof="kvmend_fixes.proofs.fastdeploy_xpu_kv_cache",
    # The runner's module is imported by workers on XPU and nowhere else; everybody else shall not pay for its verdict.
    judge_late=True,
)

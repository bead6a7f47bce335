"""Which processes of a FastDeploy create the KV tensors, configuration by configuration, read off its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from kvmend.api import BodySource, Sources, record
from kvmend_fixes.fastdeploy._xpu_source import CONFIGURATIONS, Tests, Unreadable, calls, evaluate, holds, paths_to

PREFIX_CACHE = "fastdeploy.cache_manager.prefix_cache_manager"
TRANSFER = "fastdeploy.cache_manager.cache_transfer_manager"
MESSAGER = "fastdeploy.cache_manager.cache_messager"
ENGINE = "fastdeploy.engine.engine"
SERVICE = "fastdeploy.engine.common_engine"
EXPERTS = "fastdeploy.engine.expert_service"
ASYNC = "fastdeploy.engine.async_llm"
#: Engine processes that start the cache service: module, class, and whether every release has it.
_STARTERS = (
    (ENGINE, "LLMEngine", True),
    (EXPERTS, "ExpertService", True),
    (SERVICE, "EngineService", False),
    (ASYNC, "AsyncLLMEngine", False),
)

_FLAG = "--create_cache_tensor"
#: The names of the configurations where a process creates the KV tensors.
Creates = frozenset[str]


@record(frozen=True, kw_only=True)
class LaunchRule:
    """Who creates beside the runner.

    Attributes:
        transfer: Where the transfer manager creates.
        messager: Where the cache messager creates.
    """

    transfer: Creates
    messager: Creates

    @property
    def others(self) -> Creates:
        """Where somebody other than the runner creates."""
        return self.transfer | self.messager


#: Where a mixed server with prefix caching has a creating transfer manager, for each known generation.
GENERATIONS: dict[frozenset[str], str] = {
    frozenset(): "never",
    frozenset({"mixed+cpu+prefix", "mixed+cpu+storage+prefix"}): "cpu-blocks",
    frozenset({"mixed+cpu+prefix", "mixed+storage+prefix", "mixed+cpu+storage+prefix"}): "cpu-blocks-or-storage",
    frozenset({"mixed+storage+prefix", "mixed+cpu+storage+prefix"}): "storage",
}


def generation_of(rule: LaunchRule) -> str | None:
    """Name of the generation that a rule belongs to, or None if it is none that is known."""
    if rule.messager != frozenset(each.name for each in CONFIGURATIONS if each.splitwise):
        return None
    return GENERATIONS.get(rule.transfer)


def read_launch_rule(sources: Sources) -> LaunchRule:
    """The launch rule of an installation.

    Raises:
        Unreadable: Some place of it is not as in any known generation.
        LookupError: A function that takes part in it is not there; the message names it.
    """
    launch = _need(sources, PREFIX_CACHE, "PrefixCacheManager.launch_cache_manager")
    service = _need(sources, SERVICE, "EngineService.start_cache_service")
    gpu_cache = _need(sources, TRANSFER, "CacheTransferManager._init_gpu_cache")
    _need(sources, PREFIX_CACHE, "PrefixCacheManager.launch_cache_messager")
    main = _need(sources, MESSAGER, "main")
    if not any(not tests for _node, tests in paths_to(main, calls("set_data_ipc"))):
        raise Unreadable(main, None, "the cache messager no longer creates the KV tensors whenever it runs")
    argument = _constant_argument(service, "create_cache_tensor")
    starters = list(_starters(sources))
    handed_on = [tests for _node, tests in paths_to(service, calls("launch_cache_manager"))]
    transfers = _transfer_ways(launch, gpu_cache)
    messagers = [tests for _node, tests in paths_to(launch, calls("launch_cache_messager"))]
    transfer: set[str] = set()
    messager: set[str] = set()
    for configuration in CONFIGURATIONS:
        values = configuration.values() | {"create_cache_tensor": argument}
        started = {
            any(holds(source, tests, values | {"do_profile": profile}) for source, tests in starter)
            for starter in starters
            for profile in (False, True)
        }
        creates = transfers.creates(values)
        sends = any(holds(launch, tests, values) for tests in messagers)
        if len(started) > 1 and (creates or sends):
            raise Unreadable(launch, None, f"not every engine starts the cache service for {configuration.name}")
        if True in started and any(holds(service, tests, values) for tests in handed_on):
            transfer.update({configuration.name} if creates else ())
            messager.update({configuration.name} if sends else ())
    return LaunchRule(transfer=frozenset(transfer), messager=frozenset(messager))


def _need(sources: Sources, module: str, qualname: str) -> BodySource:
    body = sources.body(module, qualname)
    if body is None:
        raise LookupError(f"there is no {qualname} in {module}")
    return body


def _constant_argument(service: BodySource, name: str) -> Any:
    """What the engine hands to the launch function as `name`; None where it hands over nothing of the kind."""
    for node, _tests in paths_to(service, calls("launch_cache_manager")):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg == name:
                if not isinstance(keyword.value, ast.Constant):
                    raise Unreadable(service, keyword.value, f"{name} is not a constant")
                return keyword.value.value
    return None


Starter = list[tuple[BodySource, Tests]]


def _starters(sources: Sources) -> Iterator[Starter]:
    """For each kind of engine process, the ways to `start_cache_service`, profile runs included."""
    for module, owner, always in _STARTERS:
        ways: Starter = []
        for method in ("start", "start_worker_service", "_stop_profile"):
            body = sources.body(module, f"{owner}.{method}")
            if body is None:
                continue
            for _node, tests in paths_to(body, calls("start_cache_service")):
                profiled: Tests = ((ast.Name("do_profile"), True),) if method == "_stop_profile" else ()
                ways.append((body, (*profiled, *tests)))
        if ways:
            yield ways
        elif always:
            raise LookupError(f"{owner} in {module} starts no cache service in a known way")


@record(frozen=True, kw_only=True)
class _TransferWays:
    """What leads to a transfer manager that creates: its launch, the flag on its command line, its own test."""

    launch: BodySource
    launched: Tests
    told: tuple[Tests, ...]
    gpu_cache: BodySource
    created: Tests | None

    def creates(self, values: Mapping[str, Any]) -> bool:
        """Whether it is launched, told to create, and does so when told."""
        told = any(holds(self.launch, tests, values) for tests in self.told)
        creates = self.created is not None and holds(
            self.gpu_cache, self.created, {**values, "create_cache_tensor": told}
        )
        return holds(self.launch, self.launched, values) and creates


def _transfer_ways(launch: BodySource, gpu_cache: BodySource) -> _TransferWays:
    if not any(
        isinstance(node, ast.Constant) and node.value == "cache_transfer_manager.py" for node in ast.walk(launch.tree)
    ):
        raise Unreadable(launch, None, "the launch function does not run cache_transfer_manager.py")
    launches = paths_to(launch, calls("Popen"))
    if len(launches) != 1:
        raise Unreadable(launch, None, f"{len(launches)} processes are launched here, known sources launch one")
    # Deeper tests are about scales and value tensors: the shallowest way is the one of the first key tensor.
    ways = [tests for _node, tests in paths_to(gpu_cache, calls("set_data_ipc"))]
    return _TransferWays(
        launch=launch,
        launched=launches[0][1],
        told=tuple(tests for _node, tests in paths_to(launch, _is_flag)),
        gpu_cache=gpu_cache,
        created=min(ways, key=len, default=None),
    )


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG in node.value.split()


@record(frozen=True, kw_only=True)
class AttachRule:
    """When a runner creates the KV tensors itself, instead of waiting for them and attaching.

    Attributes:
        creates: Where it creates, profile runs aside.
        signal_suffix: Attribute of the parallel configuration that completes the name of the ready signal.
    """

    creates: Creates
    signal_suffix: str


#: Seen by the runner's own condition where it is to create, and where it is to attach.
TO_CREATE: dict[str, Any] = {"splitwise_role": "mixed", "num_cpu_blocks": 0, "kvcache_storage_backend": None}
TO_ATTACH: dict[str, Any] = {"splitwise_role": "prefill"}


def read_attach_rule(source: BodySource) -> AttachRule:
    """The rule of a method `initialize_kv_cache(..., profile=False)`.

    Raises:
        Unreadable: It decides in no known way, or its condition cannot be led by `TO_CREATE` and `TO_ATTACH` alone.
    """
    decisions = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign)
        and [target.id for target in node.targets if isinstance(target, ast.Name)] == ["create_cache_tensor"]
    ]
    if len(decisions) != 1:
        raise Unreadable(source, None, f"create_cache_tensor is decided in {len(decisions)} places, known sources: one")
    condition = decisions[0].value
    inside = set(map(id, ast.walk(condition)))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in TO_CREATE:
            if id(node) not in inside:
                raise Unreadable(source, node, f"{node.attr} is used for more than the decision to create")
            if not _leads(ast.unparse(node)):
                raise Unreadable(source, node, f"{ast.unparse(node)} is no known place of {node.attr}")
    creates: set[str] = set()
    for configuration in CONFIGURATIONS:
        values = configuration.values() | {"profile": False}
        if not evaluate(source, condition, values | {"profile": True}):
            raise Unreadable(source, condition, "a profile run does not create")
        led = (evaluate(source, condition, values | TO_CREATE), evaluate(source, condition, values | TO_ATTACH))
        if not led[0] or led[1]:
            raise Unreadable(source, condition, "the decision depends on more than role, CPU blocks and storage")
        creates.update({configuration.name} if evaluate(source, condition, values) else ())
    return AttachRule(creates=frozenset(creates), signal_suffix=_signal_suffix(source))


def _leads(place: str) -> bool:
    owner = "scheduler_config" if place.endswith("splitwise_role") else "cache_config"
    return place in (f"self.{owner}.{place.rpartition('.')[2]}", f"self.fd_config.{owner}.{place.rpartition('.')[2]}")


def _signal_suffix(source: BodySource) -> str:
    for node, _tests in paths_to(source, calls("IPCSignal")):
        given = {keyword.arg: keyword.value for keyword in node.keywords} if isinstance(node, ast.Call) else {}
        name, suffix = given.get("name"), given.get("suffix")
        if isinstance(name, ast.Constant) and name.value == "cache_ready_signal" and isinstance(suffix, ast.Attribute):
            if ast.unparse(suffix.value) != "self.parallel_config":
                break
            return suffix.attr
    raise Unreadable(source, None, "the ready signal is not opened in a known way")

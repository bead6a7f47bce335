"""Loads a FastDeploy tree, real or the double, and puts the fix on it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvmend.api import Context, Counters
from kvmend.locate import locate_path
from kvmend_fixes.fastdeploy.prefill_cache import FIX

DOUBLE = Path(__file__).resolve().parents[1] / "support" / "fastdeploy_double"
#: Names of the trees loaded in this process.
USED: list[str] = []

#: A small pool has no room for what later releases reserve for decoding.
_ENVIRONMENT = {
    "ENABLE_V1_KVCACHE_SCHEDULER": "1",
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0",
    "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0",
    "FD_PLUGINS": "none",
    "FD_USE_NEW_TOKEN_RATIO_RESERVE": "0",
}


def wanted() -> list[Path]:
    """The trees that this process is to test: a real one, or both generations of the double."""
    named = os.environ.get("KVMEND_FASTDEPLOY_TREE")
    return [Path(named)] if named else [double("late"), double("early")]


@functools.cache
def double(generation: str) -> Path:
    """A folder with the double of one generation: "late" as up to 2.5, "early" as from PRs 7364 and 7797 on."""
    folder = Path(tempfile.mkdtemp(prefix="fastdeploy-double-")) / f"double-{generation}"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(DOUBLE, folder)
    for path in folder.rglob("*.py"):
        lines = path.read_text().splitlines(keepends=True)
        if generation == "early":
            lines = [line.replace("# early: ", "") for line in lines if "# late:" not in line]
        path.write_text("".join(lines))
    return folder


def real_trees() -> list[Path]:
    """Folders of real trees: KVMEND_FASTDEPLOY_TREES, or what lies below ~/.cache/kvmend/fastdeploy."""
    named = os.environ.get("KVMEND_FASTDEPLOY_TREES")
    if named is not None:
        return [Path(part) for part in named.split(os.pathsep) if part]
    cache = Path("~/.cache/kvmend/fastdeploy").expanduser()
    found = cache.iterdir() if cache.is_dir() else ()
    return sorted(path for path in found if (path / "fastdeploy" / "__init__.py").is_file())


class Tree:
    """The names of one tree that the tests use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.double = path.name.startswith("double-")
        scheduling = importlib.import_module("fastdeploy.engine.sched.resource_manager_v1")
        requests = importlib.import_module("fastdeploy.engine.request")
        self.ResourceManagerV1 = scheduling.ResourceManagerV1
        self.PrefixCacheManager = importlib.import_module(
            "fastdeploy.cache_manager.prefix_cache_manager"
        ).PrefixCacheManager
        self.CacheStatus = importlib.import_module("fastdeploy.cache_manager.cache_data").CacheStatus
        self.RequestStatus = requests.RequestStatus
        self.metrics = importlib.import_module("fastdeploy.metrics.metrics").main_process_metrics
        self._requests = requests
        installation = locate_path(FIX.framework, path)
        assert installation is not None, f"no fastdeploy in {path}"
        self.finding = FIX.probe(installation)

    def request(self, name: str, prompt: list[int], images: Any) -> Any:
        """A request as the engine makes it from what a client sends."""
        request = self._requests.Request.from_dict(
            {"request_id": name, "prompt_token_ids": prompt, "prompt_token_ids_len": len(prompt), "arrival_time": 0.0}
        )
        request.output_token_ids = []
        request.disaggregate_info = {}
        request.multimodal_inputs = images
        request.async_process_futures = []
        if getattr(request, "metrics", None) is None and self.finding.facts["place"] != "cache_info":
            request.metrics = self._requests.RequestMetrics()
        return request

    def images(self, images: Sequence[Any]) -> dict[str, Any]:
        """`multimodal_inputs` of a request with these images."""
        if not images:
            return {}
        return {
            "mm_positions": [SimpleNamespace(offset=image.offset, length=image.length) for image in images],
            "mm_hashes": [f"image {image.content}" for image in images],
        }

    def count(self, counter: str) -> int:
        """Value of a Prometheus counter of the process."""
        return int(next(iter(getattr(self.metrics, counter).collect()[0].samples)).value)

    @contextlib.contextmanager
    def fixed(self, mode: str) -> Iterator[Any]:
        """The fix in place, straight from its record; gives its counters."""
        with applied_by_hand(mode, self.finding) as counters:
            yield counters


@contextlib.contextmanager
def applied_by_hand(mode: str, finding: Any) -> Iterator[Any]:
    """Wraps the sites that the record names and puts everything back; stands for `kvmend.loading.apply_all()`."""
    counters = Counters(FIX.counters)
    context = Context(
        mode=mode,
        features=finding.features,
        facts=finding.facts,
        counters=counters,
        log=logging.getLogger("kvmend.fastdeploy"),
    )
    done = []
    for site in FIX.sites_for(mode, finding.features):
        holder = getattr(sys.modules[site.module], site.qualname.split(".")[0])
        name = site.qualname.split(".")[1]
        original = vars(holder)[name]
        setattr(holder, name, site.wrap(original, context))
        done.append((holder, name, original))
    try:
        yield counters
    finally:
        for holder, name, original in reversed(done):
            setattr(holder, name, original)


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[Tree]:
    """Imports a tree, and forgets it again so that other tests see the `fastdeploy` that is installed, if any."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fastdeploy"}
    for name in before:
        del sys.modules[name]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("FD_LOG_DIR", tempfile.mkdtemp(prefix="fastdeploy-log-"))
    sys.path.insert(0, str(path))
    try:
        tree = Tree(path)
        quiet()
        USED.append(tree.name)
        yield tree
    finally:
        sys.path.remove(str(path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "fastdeploy"]:
            del sys.modules[name]
        sys.modules.update(before)


def quiet() -> None:
    """Keeps FastDeploy, which logs every block, from slowing the tests down."""
    for name in [*logging.root.manager.loggerDict]:
        logger = logging.getLogger(name)
        if any(isinstance(handler, logging.FileHandler) for handler in logger.handlers):
            logger.setLevel(logging.CRITICAL)

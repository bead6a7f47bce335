"""What the fix reads off a tree's source."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from fdtree import real_trees

from kvmend.locate import locate_path
from kvmend.source import find_body
from kvmend_fixes.fastdeploy._prefill_source import CACHE_MANAGER, NODES, RESOURCE_MANAGER, probe
from kvmend_fixes.fastdeploy.prefill_cache import FIX
from support.verdicts import told_by_files

EXPECTED = {
    "double-late": {"no-publication", "no-guard", "storage", "output-caching"},
    "double-early": {"storage", "output-caching"},
    "2.3": {"no-publication", "no-guard"},
    "2.4": {"no-publication", "no-guard"},
    "2.5": {"no-publication", "no-guard", "storage", "output-caching"},
    "7364-parent": {"no-publication", "no-guard", "storage", "output-caching"},
    "7364": {"no-guard", "storage", "output-caching"},
    "7420-parent": {"no-guard", "storage", "output-caching"},
    "7420": {"no-guard", "storage", "output-caching"},
    "2.6": {"storage", "output-caching"},
    "develop": {"storage", "output-caching"},
}

MANAGER = """
class ResourceManagerV1:
    def preallocate_resource_in_p(self, request):
        with self.lock:
            PUBLISH
            return True
    def get_prefix_cached_blocks(self, request): ...
    def _get_num_new_tokens(self, request, token_budget): ...
    def _prepare_prefill_task(self, request, new_token_num): ...
    def schedule(self):
        with self.lock:
            tokens = self._get_num_new_tokens(request, 1)
            self._prepare_prefill_task(request, tokens)
"""
CACHE = """
class PrefixCacheManager:
    def update_cache_blocks(self, task, block_size, num_computed_tokens):
        node, tokens = self.places[task.request_id]
        GUARD
        self.mm_build_path(task)
        task.owned = num_computed_tokens // block_size
"""
NODE = "class BlockNode: ..."


def sources(manager: str = MANAGER, cache: str = CACHE, publish: str = "pass", guard: str = "pass") -> Any:
    """Source texts that stand for an installation."""
    texts = {
        RESOURCE_MANAGER: manager.replace("PUBLISH", publish),
        CACHE_MANAGER: cache.replace("GUARD", guard),
        NODES: NODE,
    }
    for text in texts.values():
        ast.parse(text)
    return SimpleNamespace(
        text=texts.get,
        body=lambda module, qualname: find_body(texts[module], module, qualname, module) if module in texts else None,
    )


def test_every_tree_is_affected_with_the_features_it_has(tree: Any) -> None:
    """Catches a probe that takes one release for another."""
    assert tree.finding.state == "affected"
    if tree.name in EXPECTED:
        assert tree.finding.features == EXPECTED[tree.name]


def test_every_site_of_every_mode_exists_in_the_tree(tree: Any) -> None:
    """Catches a site that some release does not have, which would make the fix fail there."""
    managers = {"ResourceManagerV1": tree.ResourceManagerV1, "PrefixCacheManager": tree.PrefixCacheManager}
    for mode in FIX.modes:
        for site in FIX.sites_for(mode, tree.finding.features):
            holder, name = site.qualname.split(".")
            assert name in vars(managers[holder])


def test_no_site_is_wrapped_twice_in_a_mode(tree: Any) -> None:
    """Catches two records for one method that are wanted together."""
    for mode in FIX.modes:
        keys = [site.key for site in FIX.sites_for(mode, tree.finding.features)]
        assert len(set(keys)) == len(keys)


def test_names_are_read_off_the_source() -> None:
    finding = probe(sources())
    assert finding.facts == {"place": "places", "cached_blocks": "owned"}
    assert finding.features == {"no-publication", "no-guard"}


def test_publication_and_guard_are_recognised() -> None:
    publish = "self.cache_manager.update_cache_blocks(request, 1, 2)"
    assert probe(sources(publish=publish)).features == {"no-guard"}
    assert probe(sources(publish=publish, guard="if tokens <= node: return")).features == set()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (sources(manager=MANAGER.replace("_prepare_prefill_task", "_prepare")), "_prepare_prefill_task"),
        (sources(manager=MANAGER.replace("with self.lock", "with other")), "lock"),
        (sources(cache=CACHE.replace("node, tokens =", "place =")), "place in the tree"),
        (sources(cache=CACHE.replace("update_cache_blocks", "update")), "update_cache_blocks"),
        (sources(guard="if tokens <= node: return"), "early return"),
    ],
)
def test_a_source_the_seams_do_not_fit_is_unknown(broken: Any, reason: str) -> None:
    """Catches a probe that says yes to what it does not understand."""
    finding = probe(broken)
    assert finding.state == "unknown"
    assert reason in finding.reason


def test_a_tree_without_the_scheduler_is_not_affected() -> None:
    assert probe(sources(manager="class Other: ...")).state == "not_affected"


def test_the_table_says_of_a_real_tree_s_files_what_the_probe_says_of_its_source() -> None:
    """Catches a table that was not made anew after a change of the probe, or that lacks a tree's files."""
    for path in real_trees():
        installation = locate_path(FIX.framework, path)
        assert installation is not None
        assert told_by_files(FIX, installation), path


def test_eager_mode_touches_nothing_where_upstream_has_both_changes() -> None:
    assert not FIX.sites_for("eager", frozenset({"storage", "output-caching"}))

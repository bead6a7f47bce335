"""The launch rule is read off source, and where it cannot be read the reason names file and line."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest
from xputrees import DOUBLES, known_of, real_trees

from kvmend.judge import judge
from kvmend.locate import Installation, locate_path
from kvmend_fixes.fastdeploy._launch_rule import GENERATIONS, TO_ATTACH, TO_CREATE, read_launch_rule
from kvmend_fixes.fastdeploy._xpu_source import CONFIGURATIONS
from kvmend_fixes.fastdeploy.xpu_kv_cache import FIX
from support import xpu_double

ENGINE = "fastdeploy/engine/engine.py"
EXPERTS = "fastdeploy/engine/expert_service.py"
PREFIX = "fastdeploy/cache_manager/prefix_cache_manager.py"
TRANSFER = "fastdeploy/cache_manager/cache_transfer_manager.py"
MESSAGER = "fastdeploy/cache_manager/cache_messager.py"
RUNNER = "fastdeploy/worker/xpu_model_runner.py"


def installation(path: Path) -> Installation:
    found = locate_path(FIX.framework, path)
    assert found is not None
    return found


@pytest.mark.parametrize("tree", DOUBLES)
def test_every_generation_is_told_apart(tree: str, tmp_path: Path) -> None:
    known = known_of(tree)
    finding = FIX.probe(installation(xpu_double.write(tmp_path, tree)))
    assert finding.facts["generation"] == known.launch
    assert {"not_affected": "not_affected", "already_fixed": "fixed"}.get(known.outcome, "affected") == finding.state


def test_real_trees_are_known_by_their_source_and_read_as_they_are_known() -> None:
    """Fails for a table of fingerprints that does not belong to the sites and bodies of the fix as it is."""
    states = {"not_affected": "not_affected", "already_fixed": "fixed"}
    for name, path in real_trees().items():
        verdict, known = judge(FIX, installation(path)), known_of(name)
        assert name in verdict.known_as, verdict.reason
        assert verdict.state == states.get(known.outcome, "affected"), name
        assert verdict.facts["generation"] == known.launch, name


def test_a_source_that_is_in_no_table_is_not_touched(tmp_path: Path) -> None:
    verdict = judge(FIX, installation(xpu_double.write(tmp_path, "like-2.6")))
    assert verdict.state == "unknown"
    assert "is that of no known release" in verdict.reason


UNREADABLE = [
    (ENGINE, '== "mixed":', '== "mixed" and self.lucky():'),
    (ENGINE, "        blocks = int(", "        if self.off:\n            return\n        blocks = int("),
    (EXPERTS, "service_wanted.cache_config.enable_prefix_caching", "self.cfg.cache_config.enable_prefix_sharing"),
    (PREFIX, "if cache_config.kvcache_storage_backend or", "if cache_config.remote_tier or"),
    (PREFIX, "self.enable_splitwise == 0 and", "self.enable_splitwise == self.mode and"),
    (PREFIX, '"cache_transfer_manager.py"', '"cache_mover.py"'),
    (
        PREFIX,
        "                words = self",
        "                subprocess.Popen('warm up')\n                words = self",
    ),
    (
        TRANSFER,
        "if args.create_cache_tensor is True:\n                tensor",
        "if args.owner:\n                tensor",
    ),
    (MESSAGER, "        set_data_ipc(tensor, name)", "        if args.owner:\n            set_data_ipc(tensor, name)"),
    (RUNNER, "or (self.fd_config", "or self.role_of_today() or (self.fd_config"),
    (RUNNER, "or (self.fd_config", "or self.cache_config.enable_prefix_caching or (self.fd_config"),
    (RUNNER, "        caches = []", "        caches = [] if self.scheduler_config.splitwise_role else None"),
    (RUNNER, "create_cache_tensor = profile or", "create_cache_tensor ="),
    (RUNNER, "suffix=self.parallel_config.", "suffix=self.fd_config.parallel_config."),
]


@pytest.mark.parametrize(("module", "text", "instead"), UNREADABLE)
def test_what_cannot_be_read_means_hands_off_and_the_reason_says_where(
    module: str, text: str, instead: str, tmp_path: Path
) -> None:
    """Fails for a reader that guesses: each of these changes could move the creation to another process."""
    path = xpu_double.write(tmp_path, "like-2.6", changed=(module, text, instead))
    finding = FIX.probe(installation(path))
    assert finding.state == "unknown"
    file, line = finding.reason.split(": ")[0].rsplit(":", 1)
    assert Path(file).is_file()
    assert 0 < int(line) <= len(Path(file).read_text(encoding="utf-8").splitlines())


def test_the_line_named_is_the_line_of_the_test(tmp_path: Path) -> None:
    path = xpu_double.write(
        tmp_path, "like-2.6", changed=(PREFIX, "if cache_config.kvcache_storage_backend or", "if cache_config.tier or")
    )
    reason = FIX.probe(installation(path)).reason
    line = int(reason.split(": ")[0].rsplit(":", 1)[1])
    assert "cache_config.tier" in (path / PREFIX).read_text(encoding="utf-8").splitlines()[line - 1]
    assert "`cache_config.tier`" in reason


def test_a_rule_that_can_be_read_but_is_that_of_no_generation_is_unknown(tmp_path: Path) -> None:
    """Fails for a fix that follows any rule it can evaluate: a new one may come with a new way to attach."""
    changed = (PREFIX, "if cache_config.kvcache_storage_backend or cache_config.num_cpu_blocks > 0", "if True")
    path = xpu_double.write(tmp_path, "like-2.5", changed=changed)
    finding = FIX.probe(installation(path))
    assert (finding.state, finding.features) == ("unknown", frozenset())
    assert "mixed+prefix" in finding.reason


def test_engines_that_launch_differently_are_unknown(tmp_path: Path) -> None:
    """Fails for a rule that is read off one kind of engine process only."""
    changed = (EXPERTS, "service_wanted.cache_config.enable_prefix_caching or ", "")
    path = xpu_double.write(tmp_path, "like-2.5", changed=changed)
    finding = FIX.probe(installation(path))
    assert finding.state == "unknown"
    assert "not every engine starts the cache service" in finding.reason


def test_an_installation_without_an_xpu_runner_is_not_affected(tmp_path: Path) -> None:
    path = xpu_double.write(tmp_path, "like-2.5")
    (path / RUNNER).unlink()
    assert FIX.probe(installation(path)).state == "not_affected"


@pytest.mark.parametrize("module", [ENGINE, EXPERTS, PREFIX, TRANSFER, MESSAGER, "fastdeploy/spec_decode/mtp.py"])
def test_a_part_that_is_gone_is_named(module: str, tmp_path: Path) -> None:
    path = xpu_double.write(tmp_path, "like-2.5")
    (path / module).unlink()
    finding = FIX.probe(installation(path))
    assert finding.state == "unknown"
    assert module.removesuffix(".py").replace("/", ".") in finding.reason


def test_a_missing_package_raises_nothing(tmp_path: Path) -> None:
    path = xpu_double.write(tmp_path, "like-2.5")
    shutil.rmtree(path / "fastdeploy" / "cache_manager")
    assert FIX.probe(installation(path)).state == "unknown"


def test_the_generations_differ_only_where_a_mixed_server_has_prefix_caching() -> None:
    names = {each.name: each for each in CONFIGURATIONS}
    for creates in GENERATIONS:
        for name in creates:
            assert not names[name].splitwise
            assert names[name].prefix_caching


def test_a_configuration_that_starts_is_one_that_the_arguments_accept() -> None:
    assert len(CONFIGURATIONS) == 16
    assert sum(each.possible for each in CONFIGURATIONS) == 12


def test_reading_a_rule_does_not_depend_on_how_the_source_is_written(tmp_path: Path) -> None:
    """Fails for a reader that compares text: the same tests in another layout are the same rule."""
    path = xpu_double.write(tmp_path, "like-2.6")
    before = read_launch_rule(installation(path))
    for module in (ENGINE, EXPERTS, PREFIX, TRANSFER, MESSAGER):
        file = path / module
        file.write_text(ast.unparse(ast.parse(file.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")
    assert read_launch_rule(installation(path)) == before


def test_what_the_runner_is_shown_leads_every_known_condition(tmp_path: Path) -> None:
    """The lead is three attributes; a condition that looks at a fourth is unreadable (see above)."""
    conditions: dict[str, Any] = {}
    for name in xpu_double.CONDITION:
        path = xpu_double.write(tmp_path / name, "like-2.6", runner=name)
        finding = FIX.probe(installation(path))
        assert finding.state != "unknown", finding.reason
        conditions[name] = tuple(finding.facts["runner"])
    assert len(set(conditions.values())) == len(conditions)
    assert set(TO_ATTACH) <= set(TO_CREATE)

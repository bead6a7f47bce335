"""Upstream's own tests, from its released sdist, with kvmend and without.

Nothing of them is kept in this repository: they are downloaded, unpacked into a cache and run where they lie.
Run as `python -m upstream.suite RELEASE` in an environment that has that release of vLLM; nox does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

CACHE = Path(os.environ.get("KVMEND_CACHE", Path.home() / ".cache" / "kvmend")) / "upstream"

#: What runs offline on a CPU, as far as it does; tests that want other models fail alike with and without.
FILES = ("tests/v1/core/test_scheduler.py",)

#: 0.27.0's tests of its own fix. The last one asks for an attribute that 0.26 does not have.
FIX_RELEASE = "0.27.0"
FIX_TESTS = (
    "test_prefix_cache_query_not_inflated_by_connector_defer",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request",
    "test_prefix_cache_stats_not_recorded_when_caching_disabled",
    "test_preemption_re_records_prefix_cache_query",
)

#: The tests ask for a model by name and read nothing of it but its config.json, whose numbers are public.
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


@dataclass(frozen=True)
class Run:
    """One run of upstream tests: test name to "passed", "failed" or "skipped"."""

    outcomes: dict[str, str]

    @property
    def passed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def unpacked(release: str) -> Path:
    """The folder with a release's `tests/`, downloaded if it is not there yet; renamed into place when whole."""
    folder = CACHE / release
    if not folder.exists():
        work = CACHE / f".{release}.{os.getpid()}"
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--dest", str(work), f"vllm=={release}"]
        environment = os.environ | {
            "VLLM_VERSION_OVERRIDE": release,
            "VLLM_TARGET_DEVICE": "empty",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        subprocess.run(command, check=True, env=environment)
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            top = archive.name.removesuffix(".tar.gz")
            members = [member for member in tar.getmembers() if member.name.startswith(f"{top}/tests/")]
            tar.extractall(work, members=members, filter="data")
        root = work / top
        model = root / "facebook" / "opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(_OPT), encoding="utf-8")
        try:
            root.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        shutil.rmtree(work)
    return folder


def run(release: str, tests: Sequence[str], *, mended: bool, select: Sequence[str] = ()) -> Run:
    """Runs upstream tests in a subprocess.

    Args:
        release: Whose tests.
        tests: Files below the sdist, or test ids.
        mended: Whether kvmend is on.
        select: Names to run; all if empty.
    """
    folder = unpacked(release)
    report = folder / f"junit-{'with' if mended else 'without'}.xml"
    report.unlink(missing_ok=True)
    here = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.pytest_kvmend", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "-o", "addopts=", *tests]
    if select:
        command += ["-k", " or ".join(select)]
    with tempfile.TemporaryDirectory(prefix="kvmend-upstream-") as state:
        environment = os.environ | {
            "KVMEND": "1" if mended else "0",
            "KVMEND_STRICT": "0",
            "KVMEND_STATE_DIR": state,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(here),
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        states = [json.loads(path.read_text(encoding="utf-8")) for path in Path(state).glob("kvmend-*.json")]
    if not report.exists():
        raise RuntimeError(f"upstream's tests of {release} did not run:\n{(done.stdout + done.stderr)[-2000:]}")
    outcomes_seen = {fix["outcome"] for each in states for fix in each["fixes"] if fix["fix"] == "vllm-prefix-stats"}
    if outcomes_seen != {"applied" if mended else "disabled"}:
        raise RuntimeError(f"kvmend was {outcomes_seen or 'not loaded'} in upstream's tests of {release}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return Run(outcomes)


def main(release: str) -> int:
    """Runs the release's own suite with and without, then 0.27.0's tests of the fix; 0 if all is as it must be."""
    console = Console()
    table = Table(box=None, header_style="bold")
    for heading in ("upstream tests", "on", "without: passed / failed", "with: passed / failed", "verdict"):
        table.add_column(heading)
    good = True
    for tests, select, name in ((FILES, (), release), (FILES, FIX_TESTS, FIX_RELEASE)):
        results = []
        for mended in (False, True):
            with console.status(f"{name}'s tests on {release}, {'with' if mended else 'without'} kvmend"):
                results.append(run(name, tests, mended=mended, select=select))
        without, with_ = results
        same = without.passed == with_.passed
        right = same if not select else without.passed < with_.passed
        good &= right
        table.add_row(
            f"{name} {'the fix' if select else 'test_scheduler.py'}",
            release,
            *(f"{len(each.passed)} / {len(each.outcomes) - len(each.passed)}" for each in results),
            ("same tests pass" if same else "more pass with kvmend") if right else "DIFFERENT",
        )
        if not right:
            for test in sorted(without.passed ^ with_.passed):
                console.print(f"differs: {test}", markup=False)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

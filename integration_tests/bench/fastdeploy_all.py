"""Every FastDeploy benchmark that can run here: `python -m bench.fastdeploy_all --out FOLDER [--quick] [--trace FILE]`.

Trees are found as for the tests; Paddle has to be in the interpreter that KVMEND_FASTDEPLOY_PYTHON names, or in this
one. If either is missing, one line says so and nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "fastdeploy"), str(_TESTS.parent / "plugins"), str(_TESTS.parent / "patches")]

from bench import traces  # noqa: E402

PYTHON = os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable)
#: Trees that each benchmark is about; of the replay also the modes.
OVERHEAD = ("2.5", "7364", "2.6")
START = "2.6"
REPLAY = ("2.5:off", "2.5:safe", "7364:off", "7364:safe", "2.6:off", "2.6:safe")
XPU = ("2.3", "2.4", "2.5", "2.6", "7420-parent", "7420", "develop")


def missing(trees: dict[str, Path]) -> str:
    """What is lacking here, or nothing."""
    if not trees:
        return "no source tree: name some in KVMEND_FASTDEPLOY_TREES or put them below ~/.cache/kvmend/fastdeploy"
    try:
        done = subprocess.run([PYTHON, "-c", "import paddle"], capture_output=True, check=False)
    except OSError as error:
        return f"KVMEND_FASTDEPLOY_PYTHON={PYTHON} does not start: {error.strerror}"
    return "" if done.returncode == 0 else f"{PYTHON} has no Paddle: name an interpreter in KVMEND_FASTDEPLOY_PYTHON"


def main() -> int:
    """Runs them one after the other; 1 if one of them failed or missed a target."""
    import fdtree

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="shows that it runs; the figures are rough")
    traces.add_options(parser)
    options = parser.parse_args()
    trees = {path.name: path for path in fdtree.real_trees()}
    if reason := missing(trees):
        print(f"FastDeploy benchmarks are skipped: {reason}")
        return 0

    def these(names: tuple[str, ...]) -> list[str]:
        wanted = dict.fromkeys(name.partition(":")[0] for name in names)
        return [str(trees[name]) for name in (list(wanted)[:1] if options.quick else wanted) if name in trees]

    trace = ["--requests", str(options.requests), *(["--trace", str(options.trace)] if options.trace else [])]
    quick = ["--quick"] if options.quick else []
    commands = {
        "fastdeploy_overhead": ["--trees", *these(OVERHEAD), *quick],
        "fastdeploy_instructions": ["--trees", *these(OVERHEAD), *quick],
        "fastdeploy_replay": ["--trees", *these(REPLAY), "--pairs", *REPLAY, *trace, *quick],
        "xpu_table": these(XPU[1:] if options.quick else XPU),
    }
    failed = False
    for number, (name, arguments) in enumerate(commands.items(), 1):
        print(f"[{number}/{len(commands)}] {name}", flush=True)
        command = [PYTHON, str(Path(__file__).with_name(f"{name}.py")), *arguments, "--out", str(options.out)]
        failed |= subprocess.run(command, check=False).returncode != 0
    if START in trees:
        print("startup", flush=True)
        path = os.pathsep.join([str(trees[START]), *sys.path[:4]])
        command = [PYTHON, "-m", "bench.startup", "--framework", "FastDeploy", *quick, "--out", str(options.out)]
        failed |= subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

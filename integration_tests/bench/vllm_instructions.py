"""How many instructions a `schedule()` of vLLM takes with kvmend, relative to one without.

Run as `python -m bench.vllm_instructions [--out FOLDER]` in `integration_tests`, with an interpreter that has an
affected vLLM, where valgrind and a C compiler are installed; it takes some ten minutes. The cases are those of
`vllm_overhead`, which measures time. Instructions are no time, but the same program takes the same number of them
however busy the machine is, so that differences far below the noise of a clock are seen.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import vllm_steps
from bench.measuring import Report, arguments, compare, finish, row
from bench.vllm_overhead import LABELS, SIZES, TARGET

#: Requests that are counted for one figure; steps at least in decoding, of which every sixteenth allocates blocks.
_COUNTED, _DECODING_STEPS = 480, 16
#: Requests that go through each treatment before, while CPython specialises its code and the block pool fills.
_WARM_UP = 2000
_TREATMENTS = ("without", "with", "empty wrappers", "without again")


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", metavar="LIBRARY", help="do the counting, under callgrind; for this program itself")
    options = parser.parse_args()
    sizes = SIZES[:1] if options.quick else SIZES
    if options.count:
        count(options.count, sizes)
        return 0
    missing = [program for program in ("valgrind", "cc") if shutil.which(program) is None]
    if missing:
        print(f"vllm_instructions skipped: there is no {' and no '.join(missing)} on PATH")
        return 0
    with tempfile.TemporaryDirectory(prefix="kvmend-bench-") as folder:
        library = Path(folder) / "requests.so"
        source = Path(__file__).with_name("callgrind_requests.c")
        built = subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
        if built.returncode:
            print(f"vllm_instructions skipped: valgrind's header is not to be had: {built.stderr.splitlines()[0]}")
            return 0
        figures = counted(Path(folder), library, options.quick)
    report = Report("vllm_instructions")
    for treatment in _TREATMENTS[1:]:
        for case in vllm_steps.CASES:
            for requests in sizes:
                without, found = figures[case, requests, "without"], figures[case, requests, treatment]
                label = f"{case}, {requests} requests: {LABELS[treatment]}"
                target = TARGET if treatment == "with" else None
                note = f"{found - without:+,.0f}"
                report.rows.append(row(label, "instructions per request", compare([without], [found]), target, note))
    return finish(report, options.out)


def counted(folder: Path, library: Path, quick: bool) -> dict[tuple[str, int, str], float]:
    """Instructions per request by case, number of requests and treatment.

    Raises:
        SystemExit: The program under callgrind failed.
    """
    command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
    command += [f"--callgrind-out-file={folder / 'counts'}", sys.executable, "-m", "bench.vllm_instructions"]
    command += ["--count", str(library), *(["--quick"] if quick else [])]
    here = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(here), "KVMEND": "0", "OMP_NUM_THREADS": "1"}
    if done := subprocess.run(command, env=environment).returncode:
        raise SystemExit(f"vllm_instructions: the program under callgrind ended with exit code {done}")
    return read(folder)


def read(folder: Path) -> dict[tuple[str, int, str], float]:
    """The same, from what callgrind has written for each label."""
    figures = {}
    for path in folder.glob("counts.*"):
        text = path.read_text(encoding="utf-8", errors="replace")
        label = re.search(r"^desc: Trigger: Client Request: (\S+) (\d+) (.+) (\d+)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if label and total:
            case, requests, treatment, steps = label.groups()
            figures[case, int(requests), treatment] = int(total[1]) / int(requests) / int(steps)
    return figures


def count(library: str, sizes: tuple[int, ...]) -> None:
    """The program under callgrind: counts each treatment of each case."""
    requests_of = ctypes.CDLL(library)
    vllm_steps.first_scheduler()
    put = vllm_steps.treatments()
    gc.disable()
    for case in vllm_steps.CASES:
        for requests in sizes:
            block = vllm_steps.MAKERS[case](requests)
            steps = max(_DECODING_STEPS if case == "decode" else 1, _COUNTED // requests)
            for treatment in _TREATMENTS:
                print(f"  {case}, {requests} requests, {treatment}", file=sys.stderr, flush=True)
                put(treatment)
                block(max(4, _WARM_UP // requests))
                gc.collect()
                requests_of.start()
                requests_of.zero()
                with_clock, vllm_steps.timed = vllm_steps.timed, functools.partial(toggled, requests_of)
                block(steps)
                vllm_steps.timed = with_clock
                requests_of.dump(f"{case} {requests} {treatment} {steps}".encode())
                requests_of.stop()


def toggled(requests_of: ctypes.CDLL, call: Callable[[], Any]) -> tuple[float, Any]:
    """In place of `vllm_steps.timed`: what is called is counted, nothing else."""
    requests_of.toggle()
    result = call()
    requests_of.toggle()
    return 0.0, result


if __name__ == "__main__":
    raise SystemExit(main())

"""What kvmend adds to the start of a process, and what `kvmend check` takes.

Run as `python -m bench.startup [--out FOLDER]` in `integration_tests`, with an interpreter that has kvmend and vLLM,
and with `--framework FastDeploy` where that can be imported. Every figure is CPU time of a fresh process, with byte
code in the cache as in any installation, and comes with what the same process takes without kvmend.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap

from bench.measuring import Report, Row, added, arguments, finish, row
from kvmend.startup import line

#: Nobody wants these imported by a tool that looks at an installation.
HEAVY = ("torch", "paddle", "vllm", "fastdeploy")

#: What the framework's plugin loader does.
_ENTRY_POINT = """
    import json, sys, time
    {imports}
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20
    modules, memory, start = len(sys.modules), resident(), time.thread_time()
    from kvmend import loading
    loading.{function}()
    seconds = time.thread_time() - start
    from kvmend import applier
    outcomes = dict((each.fix, str(each.outcome)) for each in applier.results())
    print(json.dumps([seconds * 1000, resident() - memory, len(sys.modules) - modules, outcomes]))
"""
#: Package, a module that the fixes touch, entry function. Where the module is imported the fixes are applied; where
#: nothing is they are armed, and the standard modules that the framework would import are imported by kvmend.
_FRAMEWORKS = {
    "vLLM": ("vllm", "vllm.v1.core.sched.scheduler", "load_vllm"),
    "FastDeploy": ("fastdeploy", "fastdeploy.engine.sched.resource_manager_v1", "load_fastdeploy"),
}
_CHECK = """
    import sys
    from kvmend.cli import main
    sys.argv = ["kvmend", "check"]
    try:
        main()
    except SystemExit as error:
        pass
    sys.exit(" ".join(name for name in {heavy} if name in sys.modules) or 0)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh process; what it prints is returned."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVMEND")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def milliseconds(code: str) -> float:
    """CPU time of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = run(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if found.returncode:
        raise SystemExit(f"it ended with {found.returncode}: {found.stderr[-2000:]}")
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def entry_point(name: str, rounds: int) -> list[Row]:
    """Rows of a framework's processes."""
    package, module, function = _FRAMEWORKS[name]
    case = f"entry point in a process that has imported {name}"
    imports = f"import {package}, {module}"
    if run(imports).returncode:
        return [row(case, "ms", None, 30, f"{package} cannot be imported here")]
    nothing = f"entry point for {name} in a process that has imported nothing"
    return entered(case, imports, function, 30, rounds) + entered(nothing, "", function, None, rounds)


def entered(case: str, imports: str, function: str, target: float | None, rounds: int) -> list[Row]:
    """Time and memory that an entry function adds to a process that has imported something."""
    code = _ENTRY_POINT.format(imports=imports, function=function)
    tries = [run(code) for _ in range(rounds + 1)][1:]
    figures = [json.loads(each.stdout.splitlines()[-1]) for each in tries]
    nothing = [0.0] * rounds
    outcomes = ", ".join(f"{fix} {outcome}" for fix, outcome in figures[0][3].items())
    return [
        row(case, "ms", added(nothing, [each[0] for each in figures]), target, outcomes),
        row(f"{case}, memory", "MiB", added(nothing, [each[1] for each in figures]), None, f"{figures[0][2]} modules"),
    ]


def other_process(rounds: int) -> Row:
    """The row of a process that imports no framework, with the opt-in startup hook."""
    case = "startup hook in a process that imports no framework"
    code = line(("fastdeploy", "vllm"))
    milliseconds(code)
    bare, hooked = [], []
    for _ in range(rounds):
        bare.append(milliseconds("pass"))
        hooked.append(milliseconds(code))
    return row(case, "ms", added(bare, hooked), 2, "what the .pth file of `kvmend hook enable` runs")


def check(rounds: int) -> Row:
    """The row of `kvmend check`."""
    code = _CHECK.format(heavy=HEAVY)
    milliseconds(code)
    bare, checked = [], []
    for _ in range(rounds):
        bare.append(milliseconds("pass"))
        checked.append(milliseconds(code))
    return row("kvmend check", "ms", added(bare, checked), 500, f"imports none of {', '.join(HEAVY)}")


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--framework", choices=_FRAMEWORKS, default="vLLM", help="the rows of FastDeploy are its own only"
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else 15
    rows = entry_point(options.framework, rounds)
    if options.framework == "vLLM":
        return finish(Report("startup", [*rows, other_process(rounds), check(rounds)]), options.out)
    return finish(Report("startup", rows, file="startup-fastdeploy"), options.out)


if __name__ == "__main__":
    raise SystemExit(main())

"""Every round of a benchmark in the file format of pyperf, whose tools show how they are spread.

pyperf itself measures one thing after the other. On a machine whose pace changes by a fifth within seconds that says
nothing about one per cent; so benchmarks here take their rounds in turns, and pyperf is for looking at them:

    python -m pyperf hist FILE -b "decode, 100 requests: without"
    python -m pyperf stats FILE
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_rounds(path: Path) -> dict[str, list[list[float]]]:
    """What `write_rounds` has written.

    Raises:
        SystemExit: pyperf is not installed, or the file is none of its own.
    """
    pyperf = _pyperf(f"{path} cannot be read")
    try:
        suite = pyperf.BenchmarkSuite.load(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path} cannot be read: {error}; a file that --rounds has written is expected") from error
    return {each.get_name(): [list(run.values) for run in each.get_runs()] for each in suite.get_benchmarks()}


def write_rounds(path: Path, rounds: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Writes a suite of benchmarks.

    Args:
        path: The file; what was there is replaced.
        rounds: By name of a benchmark its processes, and of each the seconds of its rounds.

    Raises:
        SystemExit: pyperf is not installed.
    """
    pyperf = _pyperf(f"{path} cannot be written")
    benchmarks = []
    for name, processes in rounds.items():
        facts = {"name": name, "unit": "second"}
        benchmarks.append(pyperf.Benchmark([pyperf.Run(each, metadata=facts) for each in processes]))
    path.parent.mkdir(parents=True, exist_ok=True)
    pyperf.BenchmarkSuite(benchmarks).dump(str(path), replace=True)


def _pyperf(otherwise: str) -> Any:
    try:
        import pyperf
    except ImportError as error:
        raise SystemExit(f"{otherwise}: pyperf is not installed") from error
    return pyperf

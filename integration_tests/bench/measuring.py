"""Paired, interleaved measurements: what something costs with kvmend, relative to the same thing without it.

A benchmark takes two samplers, one without and one with kvmend. A sampler does a block of work and returns what it
cost, in any unit, as a float; `cpu_seconds` makes one of a function. Then, in one run on one machine:

    found = paired(without, with_, rounds=50)              # a Ratio: median of the paired ratios, 95 % interval
    report = Report("name", [row("10 waiting", "us per step", found, target=1.01)])
    report.show()                                          # a table on the terminal
    report.write(folder)                                   # folder/name.json

`pooled` puts several runs of `paired` together, each in processes of its own; `compare` and `added` take figures that
were gathered in another way, pair by pair, as ratios or as differences.

The JSON file is an object of `bench`, `machine` (see `machine`) and `rows`. A row has `case`, `unit`, `without` and
`with` (medians in the unit), `kind` (`ratio` or `added`, which of the two was measured pair by pair and is compared
with the target), `ratio`, `added` (a difference in the unit), `low` and `high` (95 % interval of the one of these that
is the row's kind), `target`, `ok` and `note`. What was not measured is null.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Does a block of work; returns what it cost, in the unit of the row.
Sampler = Callable[[], float]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """With, relative to without.

    Attributes:
        median: Of the ratios of the pairs.
        low: Lower end of the 95 % bootstrap interval of the median.
        high: Upper end.
        without: Median cost without, in the samplers' unit.
        with_: Median cost with.
        pairs: Number of pairs.
    """

    median: float
    low: float
    high: float
    without: float
    with_: float
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Added(Ratio):
    """With, less without: the same fields, of the differences of the pairs."""


def cpu_seconds(work: Callable[[], Any], times: int = 1) -> Sampler:
    """A sampler of the CPU seconds that this thread spends on one call of `work`.

    CPU time, because other programs' turns on a shared machine are no cost of ours; the garbage collector is off,
    because its passes fall into one block or the other by chance.

    Args:
        work: What to measure.
        times: Calls in a block; take so many that a block lasts a millisecond or more.
    """

    def sample() -> float:
        collecting = gc.isenabled()
        gc.disable()
        try:
            start = time.thread_time_ns()
            for _ in range(times):
                work()
            return (time.thread_time_ns() - start) / times / 1e9
        finally:
            if collecting:
                gc.enable()

    return sample


def interleaved(without: Sampler, with_: Sampler, rounds: int, warm_up: int = 3) -> tuple[list[float], list[float]]:
    """Takes `rounds` pairs, the first of each pair now one and now the other, after `warm_up` pairs for nothing.

    Whole blocks alternate, not calls: CPython specialises code for the types that it meets.
    """
    figures: tuple[list[float], list[float]] = ([], [])
    samplers = (without, with_)
    for number in range(-warm_up, rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            figure = samplers[which]()
            if number >= 0:
                figures[which].append(figure)
    return figures


def paired(without: Sampler, with_: Sampler, rounds: int, warm_up: int = 3) -> Ratio:
    """The ratio of two samplers, measured in turns; see `interleaved`."""
    return compare(*interleaved(without, with_, rounds, warm_up))


def compare(without: Sequence[float], with_: Sequence[float]) -> Ratio:
    """The ratio of figures that were taken in pairs.

    Raises:
        ValueError: There are none, or not as many of one as of the other.
    """
    return Ratio(**_summary(without, with_, lambda one, other: other / one))


def added(without: Sequence[float], with_: Sequence[float]) -> Added:
    """The difference of figures that were taken in pairs, in their unit; see `compare`."""
    return Added(**_summary(without, with_, lambda one, other: other - one))


def pooled(runs: Sequence[Ratio]) -> Ratio:
    """Several runs together: the median of their medians, with an interval over runs, not over pairs.

    Pairs of the same two processes share whatever these happen to have, as their memory layout, so that many of them
    say little about the next two. Take five runs or more.
    """
    low, high = _interval([run.median for run in runs])
    return Ratio(
        median=statistics.median(run.median for run in runs),
        low=low,
        high=high,
        without=statistics.median(run.without for run in runs),
        with_=statistics.median(run.with_ for run in runs),
        pairs=sum(run.pairs for run in runs),
    )


def _summary(
    without: Sequence[float], with_: Sequence[float], relation: Callable[[float, float], float]
) -> dict[str, Any]:
    if not without:
        raise ValueError("no pairs to compare")
    related = [relation(one, other) for one, other in zip(without, with_, strict=True)]
    low, high = _interval(related)
    return {
        "median": statistics.median(related),
        "low": low,
        "high": high,
        "without": statistics.median(without),
        "with_": statistics.median(with_),
        "pairs": len(related),
    }


def _interval(figures: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the same figures always give the same interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(figures, k=len(figures))) for _ in range(_RESAMPLES))
    return medians[round(0.025 * _RESAMPLES)], medians[round(0.975 * _RESAMPLES) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a report.

    Attributes:
        case: What was measured.
        unit: Unit of `without` and `with_`, and of an addition.
        found: The measurement; None where there is none, with the reason in `note`.
        target: What the median may be at most; None for a row that is only told.
        note: Anything to be known about the row.
    """

    case: str
    unit: str
    found: Ratio | None
    target: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None where there is none or nothing was measured."""
        return None if self.found is None or self.target is None else self.found.median <= self.target

    def as_dict(self) -> dict[str, Any]:
        """The row as it is written."""
        found, kind = self.found, "added" if isinstance(self.found, Added) else "ratio"
        both: dict[str, float | None] = {}
        if found:
            both["added"] = found.with_ - found.without
            both["ratio"] = found.with_ / found.without if found.without else None
            both[kind] = found.median
        return {
            "case": self.case,
            "unit": self.unit,
            "without": found.without if found else None,
            "with": found.with_ if found else None,
            "kind": kind,
            "ratio": both.get("ratio"),
            "added": both.get("added"),
            "low": found.low if found else None,
            "high": found.high if found else None,
            "target": self.target,
            "ok": self.ok,
            "note": self.note,
        }


def row(case: str, unit: str, found: Ratio | None, target: float | None = None, note: str = "") -> Row:
    """A `Row`, by position."""
    return Row(case=case, unit=unit, found=found, target=target, note=note)


class Report:
    """The rows of one benchmark.

    Args:
        bench: Name of the benchmark, as in "vllm_overhead".
        rows: What was measured.
        file: Name of its file without the ending, if it is not the benchmark's.
    """

    def __init__(self, bench: str, rows: Iterable[Row] = (), file: str = "") -> None:
        self.bench = bench
        self.file = file or bench
        self.rows = list(rows)

    @property
    def ok(self) -> bool:
        """Whether no target was missed."""
        return all(each.ok is not False for each in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The report as it is written."""
        return {"bench": self.bench, "machine": machine(), "rows": [each.as_dict() for each in self.rows]}

    def write(self, folder: str | Path) -> Path:
        """Writes the file, complete or not at all."""
        path = Path(folder) / f"{self.file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".json.new")
        temporary.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    def show(self) -> None:
        """Prints the rows as a table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.bench)
        for name in ("case", "unit", "without", "with", "ratio", "95 % interval", "target", "note"):
            table.add_column(name, justify="left" if name in ("case", "unit", "note") else "right", overflow="fold")
        for each in self.rows:
            table.add_row(*_cells(each), style={True: "", False: "red", None: ""}[each.ok])
        Console().print(table)


def _cells(each: Row) -> tuple[str, ...]:
    found = each.found
    if found is None:
        return each.case, each.unit, "", "", "not measured", "", "", each.note
    digits = "+.3g" if isinstance(found, Added) else ".4f"  # a sign tells a difference from a ratio
    interval = f"{found.low:{digits}} – {found.high:{digits}}"
    target = "" if each.target is None else f"{'met' if each.ok else 'missed'}: ≤ {each.target:g}"
    figures = (f"{found.without:.4g}", f"{found.with_:.4g}", f"{found.median:{digits}}", interval)
    return each.case, each.unit, *figures, target, each.note


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores, system, Python, and how busy the machine was just now."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def arguments(description: str) -> argparse.ArgumentParser:
    """The command line that every benchmark has: `--out FOLDER`, and `--quick` for a run that only shows it works."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, the figures are rough")
    return parser


def finish(report: Report, out: Path | None) -> int:
    """Prints a report and writes it if asked to; returns the exit code, 1 if a target was missed."""
    report.show()
    if out is not None:
        print(f"written to {report.write(out)}")
    return 0 if report.ok else 1

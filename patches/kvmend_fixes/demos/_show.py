"""What the demo prints: progress and errors on standard error, the result on standard output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvmend_fixes.demos._processes import DemoError
from kvmend_fixes.demos._scenarios import Comparison, Reading


class Steps:
    """One line per engine: live on a terminal, one line per event elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def engine(self, what: str) -> Iterator[Step]:
        """A line for one engine, for as long as the `with` block takes."""
        task = self._progress.add_task(escape(what), total=1, stage="")
        step = Step(self, task, what)
        step.at("starting")
        yield step
        self._progress.update(task, completed=1)

    def _at(self, task: TaskID, what: str, stage: str) -> None:
        self._progress.update(task, stage=escape(stage))
        if not self._console.is_terminal:
            self._console.print(f"{what}: {stage}", markup=False, highlight=False)


class Step:
    """The line of one engine."""

    def __init__(self, steps: Steps, task: TaskID, what: str) -> None:
        self._steps = steps
        self._task = task
        self._what = what

    def at(self, stage: str) -> None:
        """Says where it is."""
        self._steps._at(self._task, self._what, stage)


def table(comparisons: Sequence[Comparison]) -> Table:
    """The comparisons side by side, one section each."""
    result = Table(pad_edge=False)
    result.add_column("scenario")
    result.add_column("without kvmend", justify="right", no_wrap=True)
    result.add_column("with kvmend", justify="right", no_wrap=True)
    runs = max((comparison.run for comparison in comparisons), default=1)
    for each in comparisons:
        run = f", run {each.run} of {runs}" if runs > 1 else ""
        where = "over HTTP" if each.transport == "http" else "offline"
        result.add_row(f"[bold]{each.scenario.name}, {where}, {each.requests} requests{run}")
        result.add_row("prompt tokens sent", f"{each.without.sent:,d}", f"{each.mended.sent:,d}")
        result.add_row("vllm:prefix_cache_queries", f"{each.without.queries:,d}", f"{each.mended.queries:,d}")
        result.add_row("vllm:prefix_cache_hits", f"{each.without.hits:,d}", f"{each.mended.hits:,d}")
        result.add_row("reported hit rate", _rate(each.without.reported_hit_rate), _rate(each.mended.reported_hit_rate))
        result.add_row("true hit rate", _rate(each.without.true_hit_rate), _rate(each.mended.true_hit_rate))
        result.add_row("verdict", _verdict(each.without), _verdict(each.mended), end_section=True)
    return result


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    """What the table means, in a line or two."""
    exact = sum(comparison.mended.exact for comparison in comparisons)
    lines = [f"With kvmend the counters are exact in {exact} of {len(comparisons)} runs."]
    if all(comparison.without.exact for comparison in comparisons):
        lines.append("They are exact without it too: this load or this vLLM does not show the fault.")
    outcomes = {comparison.mended.outcome for comparison in comparisons if not comparison.mended.exact}
    for outcome in sorted(outcomes):
        lines.append(
            f"kvmend in the engine's process: {outcome}. See `kvmend check`."
            if outcome
            else "kvmend did not report from the engine's process. Is it installed beside this vLLM?"
        )
    return lines


def failure(console: Console, error: DemoError) -> None:
    """One line of what went wrong, and what the engine said last."""
    console.print(f"kvmend: {error}", markup=False, highlight=False, soft_wrap=True)
    for line in error.last_words:
        console.print(f"  | {line}", markup=False, highlight=False, soft_wrap=True)
    if error.log:
        console.print(f"  log: {error.log}", markup=False, highlight=False, soft_wrap=True)


def _rate(rate: float | None) -> str:
    return "not known" if rate is None else f"{rate:.1%}".replace("%", " %")


def _verdict(reading: Reading) -> str:
    return f"[{'green' if reading.exact else 'red'}]{reading.verdict}"

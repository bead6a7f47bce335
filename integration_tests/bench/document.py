"""Writes docs/benchmarks.md and its plots from the JSON files of the benchmarks.

Run as `python -m bench.document --results docs/results --page docs/benchmarks.md --images docs/images` in
`integration_tests`. What each benchmark does is told by its module's own docstring.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.xpu_table import table as xpu_rows

_HERE = Path(__file__).resolve().parent

#: Benchmarks with rows, in the order of the page; others follow by name.
TITLES = {
    "vllm_overhead": "vLLM: a scheduler step",
    "vllm_instructions": "vLLM: a scheduler step, in instructions",
    "fastdeploy_overhead": "FastDeploy: a prefill node's resource manager",
    "fastdeploy_instructions": "FastDeploy: a prefill node's resource manager, in instructions",
    "startup": "Start of a process",
}

INTRO = """\
# Benchmarks

What kvmend costs, and what it is worth. Every figure is one side of a comparison made in one run on one machine, so
that only ratios mean anything: how long a step takes here says nothing about yours. A row says what its target is, what
was measured, and whether the target is met; what misses it is left in.

This page is written by `make bench` from the JSON files in `docs/results`; nothing in it is typed by hand.

```
make bench                                          # everything that can run here
make bench ARGS="--quick"                           # shows that it runs; writes nothing here
make bench ARGS="--trace mooncake_conversation_trace.jsonl"
```

The vLLM parts build their own environments from the pinned wheels. The FastDeploy parts need trees of its source, named
in `KVMEND_FASTDEPLOY_TREES` (separated by `:`) or below `~/.cache/kvmend/fastdeploy`, and an interpreter that has
Paddle, named in `KVMEND_FASTDEPLOY_PYTHON`; without them they are skipped, and what an earlier run found stays here
with its date. The trace is `conversation_trace.jsonl` of [Mooncake](https://github.com/kvcache-ai/Mooncake) (FAST'25);
without one (`--trace` or `KVMEND_TRACE`) a generated trace with the same block-reuse statistics takes its place.
"""

VARIANTS = {"off": "as released", "safe": "with kvmend", "eager": "eager (upstream parity)"}


def main() -> int:
    """Writes the page and the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of JSON files")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder for the plots")
    options = parser.parse_args()
    results = read(options.results)
    if not results:
        print(f"no results in {options.results}: nothing is written")
        return 1
    options.page.write_text(page(results, draw(results, options.images), options.page.parent), encoding="utf-8")
    print(f"written to {options.page}")
    return 0


def read(folder: Path) -> list[dict[str, Any]]:
    """Every result in a folder, by name of its file."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def draw(results: Sequence[dict[str, Any]], folder: Path) -> dict[str, Path]:
    """Draws what there is, by benchmark."""
    drawn = {}
    for result in results:
        bench, path = result["bench"], folder / f"{result['bench']}.svg"
        if bench == "fastdeploy_replay":
            drawn[bench] = plots.fastdeploy_replay(result["runs"], path)
        elif bench == "xpu_table":
            drawn[bench] = plots.xpu_table(result["trees"], path)
        elif bench == "fastdeploy_overhead":
            drawn[bench] = plots.overhead(result["rows"], path)
    if hits := of(results, "vllm_hit_rate"):
        drawn["vllm_hit_rate"] = plots.vllm_hit_rate(hits, folder / "vllm_hit_rate.svg")
    return drawn


def of(results: Iterable[dict[str, Any]], bench: str) -> list[dict[str, Any]]:
    """The results of one benchmark."""
    return [result for result in results if result["bench"] == bench]


def page(results: Sequence[dict[str, Any]], images: dict[str, Path], folder: Path) -> str:
    """The whole page, which is to lie in `folder`."""
    newest = max(result["machine"]["date"] for result in results)
    known = [bench for bench in TITLES if of(results, bench)]
    reports = known + sorted({result["bench"] for result in results if "rows" in result} - set(known))

    def section(title: str, bench: str, lines: Iterable[str]) -> list[str]:
        parts = [f"### {title}", "", *told(bench), when(of(results, bench), newest), ""]
        if bench in images:
            parts += [f"![{title}]({Path(os.path.relpath(images[bench], folder)).as_posix()})", ""]
        return [*parts, *lines, ""]

    lines = [INTRO, "## What it costs", ""]
    lines += summary([row for bench in reports for result in of(results, bench) for row in result["rows"]])
    for bench in reports:
        rows = [row for result in of(results, bench) for row in result["rows"]]
        lines += section(TITLES.get(bench, bench), bench, report(rows))
    lines += ["## What it is worth", ""]
    if found := of(results, "vllm_hit_rate"):
        lines += section("vLLM: the reported and the true hit rate", "vllm_hit_rate", hit_rates(found))
    for result in of(results, "fastdeploy_replay"):
        title = "FastDeploy: hits, prefill saved and poisoned reads of a prefill node"
        lines += section(title, "fastdeploy_replay", replays(result))
    for result in of(results, "xpu_table"):
        lines += section("FastDeploy on XPU: KV bytes", "xpu_table", xpu_rows(result["trees"]))
    return "\n".join(lines).rstrip() + "\n"


def told(bench: str) -> list[str]:
    """What a benchmark does, from its module."""
    module = _HERE / f"{bench}.py"
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) if module.is_file() else None
    return [*(text or "").splitlines(), ""] if text else []


def when(results: Sequence[dict[str, Any]], newest: str) -> str:
    """When and where it was measured; results that an earlier run left are called so."""
    date = min(result["machine"]["date"] for result in results)
    facts = results[0]["machine"]
    kept = ", kept from an earlier run" if date < newest else ""
    trace = f"; {results[0]['trace']}" if "trace" in results[0] else ""
    busy = f", load {facts['load']:g} (other programs were running)" if facts["load"] > 2 * facts["cores"] else ""
    return (
        f"Measured on {date}{kept}: {facts['processor']}, {facts['cores']} cores, {facts['system']}, "
        f"{facts['python']}{busy}{trace}."
    )


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many targets are met, and which are not."""
    judged = [row for row in rows if row["ok"] is not None]
    missed = [row for row in judged if not row["ok"]]
    if not judged:
        return []
    spanned = sum(map(_undecided, judged))
    lines = [f"Of {len(judged)} rows with a target, {len(judged) - len(missed)} meet it by their median."]
    if spanned:
        lines[0] += f" In {spanned} the target lies within the interval: this run does not decide about them."
    return [*lines, *map(_missed, missed), ""]


def _missed(row: dict[str, Any]) -> str:
    word = "Missed by the median" if _undecided(row) else "Missed"
    return f"- {word}: {row['case']} ({row['unit']}): {_figure(row, 'median')}, target {row['target']:g}."


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of rows with a target, a figure and a verdict."""
    lines = [
        "| case | unit | without | with | with / without | 95 % interval | target | |",
        "| --- | --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for row in rows:
        if row["without"] is None:
            lines.append(f"| {row['case']} | {row['unit']} | | | not measured | | | {row['note']} |")
            continue
        verdict = {True: "ok", False: "**missed**", None: ""}[row["ok"]]
        undecided = "target within the interval" if _undecided(row) else ""
        verdict = "; ".join(filter(None, (verdict, undecided, row["note"])))
        target = "" if row["target"] is None else f"≤ {row['target']:g}"
        lines.append(
            f"| {row['case']} | {row['unit']} | {_four(row['without'])} | {_four(row['with'])} "
            f"| {_figure(row, 'median')} | {_figure(row, 'low')} – {_figure(row, 'high')} | {target} | {verdict} |"
        )
    return lines


def _undecided(row: dict[str, Any]) -> bool:
    """Whether the interval of a row reaches to both sides of its target."""
    return row["ok"] is not None and bool(row["low"] <= row["target"] < row["high"])


def _figure(row: dict[str, Any], which: str) -> str:
    value = row[row["kind"]] if which == "median" else row[which]
    return f"{value:+.3g}" if row["kind"] == "added" else f"{value:.3f}"


def _four(value: float) -> str:
    """Four digits, never as a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def hit_rates(results: Sequence[dict[str, Any]]) -> list[str]:
    """A row per situation and variant."""
    lines = [
        "| situation | variant | lookups reported / true | hit rate reported | true | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for number, situation in enumerate(each["situation"] for each in results[0]["situations"]):
        for result in results:
            total: Counter[str] = Counter()
            for window in result["situations"][number]["windows"]:
                total.update(window)
            exact = all(total[f"reported_{name}"] == total[f"true_{name}"] for name in ("requests", "queries", "hits"))
            lines.append(
                f"| {situation} | {result['who']} | {total['reported_queries'] / total['true_queries']:.2f} "
                f"| {total['reported_hits'] / total['reported_queries']:.3f} "
                f"| {total['true_hits'] / total['true_queries']:.3f} | {'exact' if exact else '**wrong**'} |"
            )
    return lines


def replays(result: dict[str, Any]) -> list[str]:
    """A row per tree and mode."""
    lines = [
        "| tree | variant | hit rate | prefill saved | most any honest policy saves | poisoned reads |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for run in result["runs"]:
        saved = f"{run['saving']:.3f}" + (", partly false" if run["poisoned"] else "")
        lines.append(
            f"| {run['tree']} | {VARIANTS[run['mode']]} | {run['hit']:.3f} | {saved} | {run['most']:.3f} "
            f"| {run['poisoned']:,} of {run['reads']:,} |"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())

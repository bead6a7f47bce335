"""Draws the benchmarks' results as SVG, readable on light and on dark pages, the same file for the same figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Middle tones on a transparent ground, so that one file does for both; told apart without colour by line or place.
INK, GRID = "#7d8590", "#7d859040"
RELEASED, MENDED, UPSTREAM, TRUE = "#d1662d", "#3b82c4", "#8a63d2", "#7d859070"
#: For what coincides with another line.
_DOTTED: dict[str, Any] = {"linestyle": (0, (1, 3)), "linewidth": 2.6, "zorder": 4}
_STYLE = {
    "svg.hashsalt": "kvmend",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
}


def _figure(columns: int, height: float = 3.4) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_STYLE)
    figure, axes = pyplot.subplots(1, columns, figsize=(9.6, height), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    # matplotlib leaves blanks at the end of some lines.
    lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _legend(figure: Any, axes: Any) -> None:
    """One legend above all panels, each entry once."""
    found = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=len(found))


def _rates(windows: Iterable[dict[str, Any]], part: str, whole: str) -> tuple[list[float], list[float]]:
    """Minutes and percentages, the windows in which there was anything."""
    known = [window for window in windows if window.get(whole)]
    return [window["from"] / 60 for window in known], [100 * window.get(part, 0) / window[whole] for window in known]


def vllm_hit_rate(results: Sequence[dict[str, Any]], path: Path) -> Path:
    """Reported and true hit rate over the trace, a panel per situation."""
    situations = [each["situation"] for each in results[0]["situations"]]
    figure, axes = _figure(len(situations))
    looks = {
        "as released": {"color": RELEASED, "linestyle": "-"},
        "with kvmend": {"color": MENDED, "linestyle": "-"},
        "fixed upstream": {"color": UPSTREAM, **_DOTTED},
    }
    for axis, situation in zip(axes, situations, strict=True):
        for result in results:
            (found,) = [each for each in result["situations"] if each["situation"] == situation]
            if "with kvmend" in result["who"]:
                truth = _rates(found["windows"], "true_hits", "true_queries")
                axis.plot(*truth, color=TRUE, linewidth=6, solid_capstyle="round", label="true, vLLM 0.26.0", zorder=1)
            look = next(look for name, look in looks.items() if name in result["who"])
            axis.plot(*_rates(found["windows"], "reported_hits", "reported_queries"), label=result["who"], **look)
        axis.set_title(situation)
        axis.set_xlabel("minutes of the trace")
        axis.set_ylabel("hit rate in each minute (%)")
        axis.set_ylim(bottom=0)
    _legend(figure, axes)
    return _save(figure, path)


def fastdeploy_replay(runs: Sequence[dict[str, Any]], path: Path) -> Path:
    """Tokens found per minute and poisoned reads so far."""
    looks = {
        ("2.5", "off"): ("2.5 as released", {"color": RELEASED, "linestyle": "-"}),
        ("2.6", "off"): ("2.6 as released (publishes early)", {"color": UPSTREAM, **_DOTTED}),
        ("2.5", "safe"): ("2.5 with kvmend", {"color": MENDED, "linestyle": "-"}),
    }
    figure, (left, right) = _figure(2)
    for key, (label, look) in looks.items():
        for run in runs:
            if (run["tree"], run["mode"]) != key:
                continue
            left.plot(*_rates(run["windows"], "hit", "prompt"), label=label, **look)
            minutes = [window["from"] / 60 for window in run["windows"]]
            so_far, total = [], 0
            for window in run["windows"]:
                total += window.get("poisoned", 0)
                so_far.append(total / 1000)
            right.plot(minutes, so_far, label=label, **look)
    left.set_title("prompt tokens found in the prefix cache")
    left.set_ylabel("of all prompt tokens, each minute (%)")
    right.set_title("reads of KV that nobody computed")
    right.set_ylabel("poisoned reads so far (thousands)")
    for axis in (left, right):
        axis.set_xlabel("minutes of the trace")
        axis.set_ylim(bottom=0)
    _legend(figure, (left, right))
    return _save(figure, path)


def xpu_table(trees: Sequence[dict[str, Any]], path: Path) -> Path:
    """KV bytes created in all configurations, relative to one creator in each."""
    figure, (axis,) = _figure(1, height=3.0)
    # With kvmend every configuration has one creator, so that its bytes are what is needed.
    sums = [[sum(row["mib"][which] for row in tree["configurations"]) for which in (0, 1)] for tree in trees]
    for which, label, colour in ((0, "as released", RELEASED), (1, "with kvmend", MENDED)):
        places = [number + (which - 0.5) * 0.36 for number in range(len(trees))]
        heights = [100 * each[which] / each[1] for each in sums]
        bars = axis.bar(places, heights, 0.34, color=colour, label=label)
        axis.bar_label(bars, [f"{height:.0f}" for height in heights], color=INK, fontsize=9, padding=2)
    axis.set_xticks(range(len(trees)), [tree["tree"] for tree in trees])
    axis.set_xlabel("FastDeploy tree")
    axis.set_ylabel("KV bytes (%; one creator: 100)")
    axis.set_ylim(0, 145)
    axis.grid(visible=False, axis="x")
    _legend(figure, (axis,))
    return _save(figure, path)


def overhead(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Ratios with their intervals, and the target of each."""
    rows = [row for row in rows if row["kind"] == "ratio" and row["target"] and row["ratio"]]
    figure, (axis,) = _figure(1, height=0.9 + 0.24 * len(rows))
    for place, row in enumerate(reversed(rows)):
        axis.plot([row["low"], row["high"]], [place, place], color=MENDED, linewidth=2)
        axis.plot([row["ratio"]], [place], "o", color=MENDED if row["ok"] else RELEASED, markersize=5)
        axis.plot([row["target"]] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=1.2)
    axis.set_yticks(range(len(rows)), [row["case"] for row in reversed(rows)], fontsize=8.5)
    axis.set_xlabel("CPU time with kvmend, relative to without (1: the same; grey bar: target; orange: missed)")
    axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    return _save(figure, path)

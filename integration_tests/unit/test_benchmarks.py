"""The benchmarks' own parts: traces, the page, the plots, and a quick run on the FastDeploy double."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import counting, document, plots, rounds, traces, vllm_instructions, vllm_overhead
from support.interpreter import ROOT

BENCH = ROOT / "integration_tests" / "bench"

#: `traces.statistics_of` the first 3,000 requests of Mooncake's conversation trace.
RECORDED = {
    "share of blocks that are hits": 0.314,
    "share of requests that hit more than the first block": 0.322,
    "hit blocks per request, 90th percentile": 23,
    "requests since a block was used last, median": 325,
    "requests since a block was used last, 90th percentile": 1075,
    "prompt tokens, median": 7985,
    "prompt tokens, 90th percentile": 29304,
    "prompt tokens, 99th percentile": 94764,
    "prompt tokens, mean": 13517,
    "different blocks per request": 18.4,
}


def test_a_generated_trace_reuses_blocks_as_the_recorded_one_does() -> None:
    found = traces.statistics_of(traces.generate())
    assert {name: found[name] for name in RECORDED} == pytest.approx(RECORDED, rel=0.2)


def test_a_generated_trace_is_the_same_for_the_same_seed_only() -> None:
    assert traces.generate(50) == traces.generate(50) == traces.generate(60)[:50]
    assert traces.generate(50, seed=1) != traces.generate(50)


def test_equal_ids_of_a_trace_mean_equal_tokens_before_them() -> None:
    """Catches a generator whose ids would make a prompt hit what it does not share."""
    before: dict[int, tuple[int, ...]] = {}
    for record in traces.generate(300):
        ids = tuple(record["hash_ids"])
        assert (len(ids) - 1) * traces.UNIT < record["input_length"] <= len(ids) * traces.UNIT
        assert len(traces.tokens_of(record)) == record["input_length"]
        for place, block in enumerate(ids):
            assert before.setdefault(block, ids[:place]) == ids[:place]


def test_without_a_trace_one_line_says_that_a_generated_one_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, name = traces.load(tmp_path / "absent.jsonl", 20)
    (line,) = capsys.readouterr().out.splitlines()
    assert "absent.jsonl: using a generated trace" in line
    assert (len(records), name) == (20, "generated trace")


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"timestamp": 1}\n')
    with pytest.raises(SystemExit, match=r"x\.jsonl is no trace: a line lacks one of timestamp"):
        traces.load(file, 20)


MACHINE = {
    "processor": "P", "cores": 2, "system": "Linux", "python": "CPython 3.11", "load": 0.1, "date": "2026-12-01",
}  # fmt: skip
ROW = {
    "case": "10 live: schedule", "unit": "us", "without": 1000.4, "with": 1010.0, "kind": "ratio", "ratio": 1.0104,
    "added": 9.6, "low": 1.001, "high": 1.019, "target": 1.02, "ok": True, "note": "",
}  # fmt: skip
WINDOW = {"from": 0.0, "reported_requests": 4, "reported_queries": 400, "reported_hits": 40}
TRUE = {"true_requests": 2, "true_queries": 200, "true_hits": 60}


def hits(who: str, window: dict[str, float]) -> dict[str, Any]:
    return {
        "bench": "vllm_hit_rate",
        "who": who,
        "trace": "t",
        "machine": MACHINE,
        "situations": [{"situation": "KV pressure", "windows": [window]}],
    }


RESULTS: list[dict[str, Any]] = [
    {
        "bench": "fastdeploy_overhead",
        "machine": MACHINE,
        "rows": [
            ROW,
            {**ROW, "case": "400 live: schedule", "ratio": 1.034, "high": 1.051, "ok": False},
            {**ROW, "case": "start", "kind": "added", "added": 12.0, "low": 11.0, "high": 13.0, "target": 30.0},
            {**ROW, "case": "told", "target": None, "ok": None},
            {**ROW, "case": "not run", "without": None, "with": None, "ratio": None, "ok": None, "note": "no tree"},
        ],
    },
    hits("vLLM 0.26.0, as released", WINDOW | TRUE),
    hits("vLLM 0.26.0, with kvmend", WINDOW | {name.replace("reported", "true"): WINDOW[name] for name in WINDOW}),
    {
        "bench": "fastdeploy_replay",
        "trace": "t",
        "machine": {**MACHINE, "date": "2026-11-01"},
        "runs": [
            {
                "tree": "2.6", "mode": "off", "hit": 0.25, "saving": 0.25, "most": 0.3, "poisoned": 1200,
                "reads": 9000, "windows": [{"from": 0.0, "prompt": 10, "hit": 5, "poisoned": 1200}],
            }
        ],
    },
    {
        "bench": "xpu_table",
        "machine": MACHINE,
        "trees": [{"tree": "2.5", "configurations": [{"name": "mixed", "creators": [2, 1], "mib": [100, 50]}]}],
    },
]  # fmt: skip


def page() -> list[str]:
    return document.page(RESULTS, {}, Path("docs")).splitlines()


def line(text: str, start: str) -> str:
    (found,) = [each for each in page() if each.startswith(start) and text in each]
    return found


def test_a_row_of_the_page_says_target_ratio_and_verdict() -> None:
    assert line("10 live", "|").endswith("| 1,000 | 1,010 | 1.010 | 1.001 – 1.019 | ≤ 1.02 | ok |")
    assert line("400 live", "|").endswith("| 1.034 | 1.001 – 1.051 | ≤ 1.02 | **missed**; target within the interval |")
    assert line("start", "|").endswith("| +12 | +11 – +13 | ≤ 30 | ok |")
    assert line("not run", "|").endswith("| not measured | | | no tree |")


def test_the_page_counts_the_targets_and_names_those_that_were_missed() -> None:
    told = "Of 3 rows with a target, 2 meet it by their median. In 1 the target lies within the interval: "
    assert f"{told}this run does not decide about them." in page()
    assert "- Missed by the median: 400 live: schedule (us): 1.034, target 1.02." in page()


def test_what_an_earlier_run_left_is_called_so() -> None:
    kept = [each for each in page() if each.startswith("Measured on")]
    assert [each for each in kept if "kept from an earlier run" in each] == [line("2026-11-01", "Measured on")]


def test_the_page_says_whether_a_reported_hit_rate_is_exact() -> None:
    assert line("as released", "| KV").endswith("| 2.00 | 0.100 | 0.300 | **wrong** |")
    assert line("with kvmend", "| KV").endswith("| 1.00 | 0.100 | 0.100 | exact |")


def test_what_is_saved_by_poison_is_called_partly_false() -> None:
    assert line("| 2.6 |", "|") == "| 2.6 | as released | 0.250 | 0.250, partly false | 0.300 | 1,200 of 9,000 |"


def test_every_benchmark_of_the_page_tells_what_it_does() -> None:
    text = "\n".join(page())
    for bench in ("fastdeploy_overhead", "vllm_hit_rate", "fastdeploy_replay", "xpu_table"):
        assert "\n".join(document.told(bench)[:2]).strip() in text


def test_the_page_in_the_repository_is_the_one_that_its_results_make() -> None:
    """Catches a page that was touched by hand, or results that were replaced without it."""
    docs = ROOT / "docs"
    results = document.read(docs / "results")
    images = {path.stem: path for path in (docs / "images").glob("*.svg")}
    assert document.page(results, images, docs) == (docs / "benchmarks.md").read_text(encoding="utf-8")


def test_the_same_results_give_the_same_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = [document.draw(copy.deepcopy(RESULTS), tmp_path / name) for name in ("one", "two")]
    assert set(drawn[0]) == {"fastdeploy_overhead", "vllm_hit_rate", "fastdeploy_replay", "xpu_table"}
    for bench, path in drawn[0].items():
        assert path.read_bytes() == drawn[1][bench].read_bytes(), bench
        assert "<dc:date>" not in path.read_text(encoding="utf-8")
    assert plots.INK in drawn[0]["vllm_hit_rate"].read_text(encoding="utf-8")


@pytest.mark.parametrize("bench", ["fastdeploy_overhead", "fastdeploy_replay"])
def test_a_quick_run_on_the_double_writes_what_the_page_needs(bench: str, tmp_path: Path) -> None:
    double = BENCH.parent / "support" / "fastdeploy_double"
    trees = [tmp_path / "2.5", tmp_path / "7364"]
    for tree in trees:
        tree.symlink_to(double)
    command = [
        sys.executable,
        str(BENCH / f"{bench}.py"),
        "--trees",
        *map(str, trees),
        "--quick",
        "--out",
        str(tmp_path),
    ]
    # The double takes minutes for what takes a real tree seconds: it compares whole prompts.
    command += ["--requests", "3"] if bench == "fastdeploy_replay" else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a target was missed, which says nothing of a double
    result = json.loads((tmp_path / f"{bench}.json").read_text(encoding="utf-8"))
    assert result["machine"]["date"] in document.page([result], {}, tmp_path)
    assert result["rows" if bench == "fastdeploy_overhead" else "runs"]


def test_without_trees_one_line_says_what_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMEND_FASTDEPLOY_TREES", "")
    command = [sys.executable, str(BENCH / "fastdeploy_all.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (told,) = done.stdout.splitlines()
    assert told.startswith("FastDeploy benchmarks are skipped: no source tree")
    assert not list(tmp_path.iterdir())


def test_without_valgrind_one_line_says_that_instructions_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["vllm_instructions", "--out", str(tmp_path)])
    assert vllm_instructions.main() == 0
    assert capsys.readouterr().out == "vllm_instructions skipped: there is no valgrind and no cc on PATH\n"
    assert not list(tmp_path.iterdir())


def test_counted_instructions_are_told_per_request_and_step(tmp_path: Path) -> None:
    """Catches figures of another case, and those of the dump at the end, which has no label."""
    counts = {"deferred|10|48|without again": 480_000, "admitted, smallest prompts|100|4|with": 800}
    for number, (label, total) in enumerate(counts.items()):
        text = f"desc: Trigger: Client Request: {label}\n\nevents: Ir\nsummary: {total}\nfn=(1)\n1 7\ntotals: {total}\n"
        (tmp_path / f"counts.{number}").write_text(text, encoding="utf-8")
    (tmp_path / "counts").write_text("desc: Trigger: Program termination\n\nsummary: 5\n", encoding="utf-8")
    found = vllm_instructions.per_request(counting.read(tmp_path))
    assert found == {
        ("deferred", 10, "without again"): 1000.0,
        ("admitted, smallest prompts", 100, "with"): 2.0,
    }


def test_pyperf_reads_the_rounds_of_a_benchmark(tmp_path: Path) -> None:
    pyperf = pytest.importorskip("pyperf")
    rounds.write_rounds(tmp_path / "new" / "rounds.json", {"decode: with": [[0.25, 0.5], [0.75]]})
    (found,) = pyperf.BenchmarkSuite.load(str(tmp_path / "new" / "rounds.json"))
    assert (found.get_name(), found.get_unit()) == ("decode: with", "second")
    assert found.get_values() == (0.25, 0.5, 0.75)


def test_without_pyperf_the_file_that_was_asked_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyperf", None)
    with pytest.raises(SystemExit, match=r"rounds\.json cannot be written: pyperf is not installed"):
        rounds.write_rounds(tmp_path / "rounds.json", {"decode: with": [[0.25]]})
    with pytest.raises(SystemExit, match=r"rounds\.json cannot be read: pyperf is not installed"):
        rounds.read_rounds(tmp_path / "rounds.json")
    assert not list(tmp_path.iterdir())


def test_rounds_that_were_written_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyperf")
    written = {"decode, 10 requests: with": [[0.25, 0.5], [0.75]], "decode, 10 requests: without": [[1.0, 1.5], [2.0]]}
    rounds.write_rounds(tmp_path / "rounds.json", written)
    assert rounds.read_rounds(tmp_path / "rounds.json") == written
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    for name in ("other.json", "none.json"):
        with pytest.raises(
            SystemExit, match=f"{name} cannot be read: .*; a file that --rounds has written is expected"
        ):
            rounds.read_rounds(tmp_path / name)


def test_rounds_of_several_runs_are_told_together_set_by_set() -> None:
    case = "decode, 10 requests"
    one = {"without": [1.0], "without again": [1.0], "with": [2.0], "with again": [2.0]}
    found = {f"{case}: {name}": [each, [3.0]] for name, each in one.items()}
    told = vllm_overhead.by_treatment(case, found | {"decode, 100 requests: with": [[9.0]]})
    assert {name: [ratio.median for ratio in each] for name, each in told.items()} == {
        "with": [2.0, 1.0],
        "without again": [1.0, 1.0],
    }
    with pytest.raises(SystemExit, match="decode, 100 requests: no rounds of without, without again, with again"):
        vllm_overhead.by_treatment("decode, 100 requests", {"decode, 100 requests: with": [[9.0]]})
    with pytest.raises(SystemExit, match="decode, 10 requests: as many processes of each treatment are expected"):
        vllm_overhead.by_treatment(case, found | {f"{case}: with": [[9.0]]})


@pytest.mark.parametrize("sets", ["0", "-1"])
def test_a_number_of_sets_that_measures_nothing_is_refused(
    sets: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_overhead", "--sets", sets])
    with pytest.raises(SystemExit):
        vllm_overhead.main()
    assert f"--sets is {sets}, and has to be 1 or more, or 0 with --add" in capsys.readouterr().err


class _Child:
    """In the place of a connection to a process that measures: what it is asked and told, in a list that all share."""

    def __init__(self, name: str, log: list[str], answers: list[Any]) -> None:
        self._name, self._log, self._answers = name, log, answers

    def send(self, message: Any) -> None:
        self._log.append(f"{self._name} is sent {message}")

    def recv(self) -> Any:
        return self._answers.pop(0)


def test_steps_that_last_longer_than_a_machine_keeps_its_pace_begin_when_all_processes_are_ready() -> None:
    log: list[str] = []
    fast, slow = _Child("fast", log, ["ready", 1.0]), _Child("slow", log, ["ready", 2.0])
    assert vllm_overhead.block_of_each([fast, slow], 1, together=True) == [1.0, 2.0]
    assert log == ["fast is sent 1", "slow is sent 1", "fast is sent begin", "slow is sent begin"]


def test_shorter_steps_are_taken_without_a_word_in_between() -> None:
    log: list[str] = []
    assert vllm_overhead.block_of_each([_Child("one", log, [1.0])], 30, together=False) == [1.0]
    assert log == ["one is sent 30"]


def test_a_set_compares_the_mean_of_two_processes_with_that_of_two_others() -> None:
    figures = {
        "without": [1e-6, 3e-6],
        "without again": [3e-6, 5e-6],
        "with": [2e-6, 6e-6],
        "with again": [4e-6, 6e-6],
        "native": [4e-6, 4e-6],
    }
    found = vllm_overhead.ratios(figures)
    assert found["with"].median == pytest.approx((3 / 2 + 6 / 4) / 2)
    assert found["without again"].median == pytest.approx((3 / 1 + 5 / 3) / 2)
    assert found["native"].median == pytest.approx((4 / 2 + 4 / 4) / 2)
    assert found["with"].without == pytest.approx(3)
    assert "native" not in vllm_overhead.ratios({name: each for name, each in figures.items() if name != "native"})

"""The reports of a folder in Prometheus's text format, for node_exporter's textfile collector or any scraper.

Every series has the labels `host`, `pid` and `process`; the last is another one after a restart, so a counter only
ever rises within a series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvmend.cli.gathering import STATES, Folder, Seen, fix_ok

_Sample = tuple[Mapping[str, str], float]
_PREFIX = "kvmend_"


def expose(folder: Folder) -> str:
    """The whole exposition; ends with a line feed."""
    seen = folder.processes
    fixes = [(each, fix) for each in seen for fix in each.data["fixes"]]
    metrics: list[tuple[str, str, str, list[_Sample]]] = [
        ("process_up", "gauge", "Whether the process runs and reports; 0 if it is silent, ended or dead.",
         [(_labels(each), each.state == "running") for each in seen]),
        ("process_info", "gauge", "What the process is; always 1.", [(_info(each), 1) for each in seen]),
        ("process_start_time_seconds", "gauge", "When kvmend was loaded or the process was forked, epoch seconds.",
         [(_labels(each), each.data["started"]) for each in seen]),
        ("report_age_seconds", "gauge", "Age of the process's report when it was read.",
         [(_labels(each), round(each.age, 3)) for each in seen]),
        ("report_time_seconds", "gauge", "When the process's report was written, epoch seconds.",
         [(_labels(each), each.data["written"]) for each in seen]),
        ("fix_outcome", "gauge", "How the fix ended in the process; always 1, the label says it.",
         [(_labels(each, fix=fix["fix"], outcome=fix["outcome"], mode=fix["mode"]), 1) for each, fix in fixes]),
        ("fix_ok", "gauge", "Whether the fix is not wanted, does its job, will do it, or is not needed.",
         [(_labels(each, fix=fix["fix"]), fix_ok(fix)) for each, fix in fixes]),
        ("fix_shadowed", "gauge", "Functions of others that bypass the fix.",
         [(_labels(each, fix=fix["fix"]), len(fix["shadowed_by"])) for each, fix in fixes]),
        ("fix_events_total", "counter", "What the fix has counted; `kvmend explain` says what each counter means.",
         [(_labels(each, fix=fix["fix"], counter=name), value)
          for each, fix in fixes for name, value in fix["counters"].items() if name not in fix["derived"]]),
        ("fix_derived", "gauge", "Counters of the fix that are computed from others and may fall.",
         [(_labels(each, fix=fix["fix"], counter=name), value)
          for each, fix in fixes for name, value in fix["counters"].items() if name in fix["derived"]]),
        ("processes", "gauge", "Processes that have a report in the folder, by state.",
         [({"state": state}, folder.count(state)) for state in STATES]),
        ("unreadable_reports", "gauge", "JSON files in the folder that are no report.", [({}, len(folder.unreadable))]),
        ("status_ok", "gauge", "Whether `kvmend status` exits with 0.", [({}, folder.ok)]),
        ("status_time_seconds", "gauge", "When the folder was read, epoch seconds.", [({}, folder.read)]),
    ]  # fmt: skip
    return "".join(line for metric in metrics for line in _metric(*metric))


def _metric(name: str, kind: str, meaning: str, samples: list[_Sample]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {meaning}\n"
    yield f"# TYPE {_PREFIX}{name} {kind}\n"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        number = value if type(value) is int else float(value)
        yield f"{_PREFIX}{name}{'{' + inside + '}' if inside else ''} {number!r}\n"


def _labels(seen: Seen, **more: str) -> dict[str, str]:
    return {"host": seen.data["host"], "pid": str(seen.data["pid"]), "process": seen.data["process"]} | more


def _info(seen: Seen) -> dict[str, str]:
    framework, version = seen.framework()
    role = seen.data["role"]
    rank = "" if role["rank"] is None else str(role["rank"])
    return _labels(
        seen,
        framework=framework,
        version=version or "",
        role=role["name"],
        rank=rank,
        node=role["node"],
        state=seen.state,
        kvmend=seen.data["kvmend"],
    )


def _escaped(text: str) -> str:
    # A lone surrogate, from a name that is no UTF-8, is no text that a scraper takes.
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

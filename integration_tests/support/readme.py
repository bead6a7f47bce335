"""Writes the generated parts of the READMEs and of the documentation from the records and the tables of known sources.

Run as `python -m support.readme` (`make readme`); with `--check` it only says whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from kvmend import registry
from kvmend.fingerprint import Table, load_table
from kvmend.fix import Fix
from kvmend.outcome import Outcome
from kvmend.settings import allowed_values
from support.reference import FIX_BLOCKS, commands, table

ROOT = Path(__file__).resolve().parents[2]
READMES = {"README.md": "en", "README.zh.md": "zh"}
FILES = READMES | {str(page.relative_to(ROOT)): "en" for page in sorted((ROOT / "docs").rglob("*.md"))}

_HEADINGS = {
    "en": {
        "support": ("fix", "releases", "source", "what kvmend does"),
        "switches": ("variable", "values", "default", "fix"),
        "outcomes": ("outcome", "meaning and what to do"),
    },
    "zh": {
        "support": ("修复", "版本", "源码", "kvmend 的动作"),
        "switches": ("环境变量", "取值", "默认", "修复"),
        "outcomes": ("结果", "含义以及该做什么"),
    },
}
_ACTION = {
    "en": {"affected": "mends it", "fixed": "leaves it alone (already_fixed)", "not_affected": "leaves it alone"},
    "zh": {"affected": "修复", "fixed": "不改动（already_fixed）", "not_affected": "不改动"},
}


#: What a source without features is called.
_PLAIN = {
    ("vllm-prefix-stats", "affected"): "record-at-lookup",
    ("vllm-prefix-stats-copied-scheduler", "affected"): "record-in-schedule",
    ("vllm-prefix-stats-copied-scheduler", "not_affected"): "counted at the lookup",
}

_MEANING_ZH = {
    Outcome.APPLIED: "修复已在这个进程里生效。无需任何操作。",
    Outcome.ARMED: "框架的模块还没有导入，导入时修复就会生效。无需任何操作。",
    Outcome.DISABLED: "被它自己的开关或 `KVMEND=0` 关掉了。",
    Outcome.NOT_INSTALLED: "这里没有安装该框架。",
    Outcome.NOT_AFFECTED: "这个版本没有该故障。无需任何操作。",
    Outcome.ALREADY_FIXED: "这个版本带有上游自己的修复，没有改动任何东西。可以去掉这个修复了。",
    Outcome.UNKNOWN_SOURCE: "安装的源码不是本版 kvmend 所认识的，没有改动任何东西。请升级 kvmend，或在看过 kvmend check 的证据后把开关设为 force。",
    Outcome.CONFLICT: "另一个插件占用了修复所需的函数，两者无法共存。请只加载其中一个。",
    Outcome.FAILED: "修复没有生效，一切都是原样；原因里有说明。",
}


def _runs(known: Table) -> list[tuple[str, str, tuple[str, ...]]]:
    """Neighbouring generations of one state and one set of features, as first and last release."""
    runs: list[tuple[str, str, list[str]]] = []
    for generation in known.generations:
        features = ", ".join(sorted(generation.features)) or _PLAIN.get((known.fix, generation.state), "–")
        features = "fixed upstream" if generation.state == "fixed" else features
        if runs and runs[-1][:2] == (generation.state, features):
            runs[-1][2].extend(generation.releases)
        else:
            runs.append((generation.state, features, list(generation.releases)))
    return [(state, features, tuple(releases)) for state, features, releases in runs]


def _support(fixes: tuple[Fix, ...], language: str) -> str:
    rows = []
    for fix in fixes:
        if not fix.fingerprints:
            continue
        for state, features, releases in _runs(load_table(fix.fingerprints)):
            span = releases[0] if len(releases) == 1 else f"{releases[0]} – {releases[-1]} ({len(releases)})"
            rows.append((f"`{fix.id}`", span, features, _ACTION[language][state]))
    return table(_HEADINGS[language]["support"], rows)


def _switches(fixes: tuple[Fix, ...], language: str) -> str:
    rows = [
        (f"`{fix.switch}`", ", ".join(f"`{value}`" for value in allowed_values(fix)), "`1`", f"`{fix.id}`")
        for fix in fixes
    ]
    return table(_HEADINGS[language]["switches"], rows)


def _outcomes(_fixes: tuple[Fix, ...], language: str) -> str:
    meaning = _MEANING_ZH if language == "zh" else {outcome: outcome.meaning for outcome in Outcome}
    return table(_HEADINGS[language]["outcomes"], [(f"`{outcome}`", meaning[outcome]) for outcome in Outcome])


def _commands(_fixes: tuple[Fix, ...], _language: str) -> str:
    return commands()


BLOCKS: dict[str, Callable[[tuple[Fix, ...], str], str]] = {
    "support": _support,
    "switches": _switches,
    "outcomes": _outcomes,
    "commands": _commands,
}


def rendered(text: str, language: str) -> str:
    """The text with every generated block written anew."""
    fixes, broken = registry.discover()
    if broken:
        raise SystemExit(f"fix {broken[0].name} could not be loaded: {broken[0].reason}")

    def block(match: re.Match[str]) -> str:
        name, _, fix_id = match[2].partition(" ")
        chosen = tuple(fix for fix in fixes if fix_id in ("", fix.id))
        if not chosen:
            raise SystemExit(f"begin: {match[2]}: no fix {fix_id!r}")
        made = FIX_BLOCKS[name](chosen[0]) if name in FIX_BLOCKS else BLOCKS[name](chosen, language)
        return f"{match[1]}\n{made}\n{match[3]}"

    return re.sub(r"(<!-- begin: ([\w -]+) -->)\n.*?\n?(<!-- end -->)", block, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Rewrites the files; with --check, 1 if one is out of date."""
    stale = []
    for name, language in FILES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        fresh = rendered(text, language)
        if fresh != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(fresh, encoding="utf-8")
    if stale:
        print(f"{'out of date' if '--check' in arguments else 'written'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

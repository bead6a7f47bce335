"""What exists outside of this repository, or deep in it, and may be named by the documentation."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from kvmend import registry
from kvmend.outcome import Outcome
from support.interpreter import SOURCES

#: Environment variables beyond kvmend's own: the frameworks' and the example's.
VARIABLES = frozenset(
    {
        "FD_LOG_DIR",
        "FD_PLUGINS",
        "KVMEND_TINYSERVE_USED_BLOCKS",
        "VLLM_PLUGINS",
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
    }
)

#: Options of the frameworks' commands, read off FastDeploy 2.5 and vLLM 0.26.0.
OPTIONS = {
    "fastdeploy.entrypoints.openai.api_server": {
        "--cache-transfer-protocol",
        "--enable-prefix-caching",
        "--model",
        "--port",
        "--router",
        "--splitwise-role",
    },
    "fastdeploy.router.launch": {"--port", "--splitwise"},
    "vllm serve": {"--distributed-executor-backend", "--tensor-parallel-size"},
}

#: Metrics as a server exposes them, read off vLLM 0.26.0 and FastDeploy 2.5; a counter's name ends in `_total`.
_VLLM = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits")
_METRICS = frozenset(
    {f"vllm:{name}_total" for name in (*_VLLM, "prompt_tokens")}
    | {f"vllm:{name}" for name in (*_VLLM, "num_requests_waiting")}
    | {
        "fastdeploy:hit_token_rate",
        "fastdeploy:prefix_cache_token_num_total",
        "fastdeploy:prompt_tokens_total",
    }
)


def families() -> frozenset[str]:
    """Names of the series of both frameworks and of `kvmend status --prometheus`."""
    from kvmend.cli import exposition

    text = Path(exposition.__file__).read_text(encoding="utf-8")
    rows = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Tuple) and len(node.elts) == 4]
    own = {f"kvmend_{first.value}" for row in rows if isinstance(first := row.elts[0], ast.Constant)}
    assert "kvmend_fix_ok" in own
    return _METRICS | own


def is_said(line: str) -> bool:
    """Whether a line, in which `…` stands for anything, is made of texts that kvmend's source has."""
    fixes, outcomes = "|".join(fix.id for fix in registry.discover()[0]), "|".join(map(str, Outcome))
    told = re.fullmatch(rf"kvmend: ({fixes}) (({outcomes})( \[\w+( [\w.]+)?\])?: )?(?P<what>.+)", line)
    if told is not None:
        switched_off = re.fullmatch(r"KVMEND(_\w+)?=0", told["what"]) is not None
        return switched_off or any(pattern.match(told["what"]) for pattern in _patterns(""))
    error = line.partition("kvmend.errors.StrictError: ")[2]
    if error:
        return any(pattern.fullmatch(error) for pattern in _patterns("=1:"))
    return any(pattern.search(line) for pattern in _patterns("kvmend"))


@functools.cache
def _patterns(word: str) -> tuple[re.Pattern[str], ...]:
    """One pattern for each text of the source that has a word, with `.*` where something is filled in."""
    found: set[str] = set()
    for root in SOURCES:
        for file in root.rglob("*.py"):
            found |= set(_texts(ast.parse(file.read_text(encoding="utf-8")), word))
    return tuple(re.compile(pattern) for pattern in sorted(found))


def _texts(tree: ast.AST, word: str) -> Iterator[str]:
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        parts: list[str | None]
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            pieces = re.split(r"(%(?:\.\d+)?[sdr])", node.value)
            parts = [None if re.fullmatch(r"%(?:\.\d+)?[sdr]", piece) else piece for piece in pieces]
        else:
            continue
        words = "".join(part for part in parts if part)
        # What is filled in may be most of it; a single word is no message.
        if word in words.lower() and len(words.strip()) > 8 and " " in words.strip() and "\n" not in words:
            yield "".join(".*" if part is None else re.escape(part) for part in parts)

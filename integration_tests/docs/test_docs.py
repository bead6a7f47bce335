"""The documentation says what is so: its commands run, its outputs are those printed, its names exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import doc_known
import pytest
from doc_pages import RUNNABLE, Step, blocks, command_lines, pages, sandbox_of, steps
from doc_sandbox import FROM_SCRATCH, SANDBOXES, run

from kvmend import registry, settings
from kvmend.cli import cli
from support.interpreter import ROOT

PAGES = pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


#: Pages that benchmarks and the matrix write; what they name must exist all the same.
GENERATED = frozenset({"docs/benchmarks.md", "docs/support.md"})


def to_run(page: Path) -> list[Step]:
    return [step for block in blocks(page) if block.language in RUNNABLE and not block.not_run for step in steps(block)]


# Commands -----------------------------------------------------------------------------------------------------------


def pages_with_commands() -> Iterator[Any]:
    """All but the Chinese README, whose blocks are those of the other: `unit/test_readme.py` holds that."""
    for page, name in zip(PAGES, NAMES, strict=True):
        if name not in {"README.zh.md", *GENERATED} and to_run(page):
            from_scratch = sandbox_of(page) in FROM_SCRATCH and name != "README.md"
            yield pytest.param(page, id=name, marks=[pytest.mark.slow] if from_scratch else [])


@pytest.mark.parametrize("page", list(pages_with_commands()))
def test_every_command_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path
) -> None:
    failures = run(to_run(page), SANDBOXES[sandbox_of(page)](tmp_path / "home"))
    assert not failures, "\n\n".join(map(str, failures))


def parsed(line: str) -> click.Context:
    """The context of a command line of kvmend; raises what click raises."""
    words = shlex.split(line)[1:]
    group: click.Group = cli
    context = click.Context(cli, info_name="kvmend")
    while words and (command := group.get_command(context, words[0])) is not None:
        context = command.make_context(words[0], words[1:], parent=context)
        if not isinstance(command, click.Group):
            return context
        group, words = command, words[1:]
    if not words or words[0] in {"--version", "--help"}:
        return context
    raise click.UsageError(f"no command {words[0]!r}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_kvmend_command_of_a_page_is_one_that_kvmend_takes(page: Path) -> None:
    wrong = []
    for where, line in command_lines(page):
        try:
            parsed(line)
        except click.ClickException as error:
            wrong.append(f"{where}: {line}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_option_of_a_framework_that_a_page_gives_is_known(page: Path) -> None:
    for block in blocks(page):
        for step in steps(block) if block.language in RUNNABLE else ():
            for command, options in doc_known.OPTIONS.items():
                if command in step.command:
                    given = re.findall(r"\s(--[a-z-]+)", step.command.partition(command)[2])
                    assert set(given) <= options, step.where


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    marked = [block for block in blocks(page) if block.not_run]
    assert text.count("<!-- not run:") == len(marked), "a comment that is above no block"
    assert all(block.language in RUNNABLE and len(block.not_run) > 10 for block in marked)
    shells = {block.language for block in blocks(page)} & {"shell", "shell-session", "zsh"}
    assert not shells, f"{shells}: use console, which is run"


# Names --------------------------------------------------------------------------------------------------------------


def known_variables() -> set[str]:
    switches = {fix.switch for fix in registry.discover()[0]}
    return {settings.MASTER, settings.STRICT, settings.STATE_DIR, *switches, *settings.ASIDE, *doc_known.VARIABLES}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_variable_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, name in re.findall(r"""--8<-- (["'])(.+?)\1""", text):
        text += (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:KVMEND(?:_[A-Z0-9_]+)?|VLLM_[A-Z_]+|FD_[A-Z_]+)\b", text))
    misspelt = set(re.findall(r"(KVMEND_\w+) is no switch|^\$ (KVMEND_VLLM_PREFIX_STAT)=", text, re.MULTILINE))
    unknown = named - known_variables() - {name for pair in misspelt for name in pair}
    assert not unknown


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|fastdeploy:|kvmend_)[a-z_]+[a-z]", expression))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for name in metrics_in(text) if name.startswith(("vllm:", "fastdeploy:"))}
    named |= {name for block in blocks(page) if block.language == "promql" for name in metrics_in(block.text)}
    assert named - doc_known.families() <= {"kvmend_fixes", "kvmend_tinyserve"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_message_that_a_page_quotes_is_one_that_kvmend_says(page: Path) -> None:
    lines = [line for block in blocks(page) if block.language == "log" for line in block.text.splitlines()]
    unknown = [line for line in lines if not doc_known.is_said(line)]
    assert not unknown, "\n".join(unknown)


def test_every_fix_and_every_outcome_has_its_place() -> None:
    for fix in registry.discover()[0]:
        text = (ROOT / "docs" / "fixes" / f"{fix.id}.md").read_text(encoding="utf-8")
        for kind in ("facts", "cause", "how", "remove", "counters", "touches", "support"):
            assert f"<!-- begin: {kind} {fix.id} -->" in text, (fix.id, kind)
        assert f"fixes/{fix.id}.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


# The site -----------------------------------------------------------------------------------------------------------


def test_the_site_builds_without_a_warning_and_every_link_and_anchor_leads_somewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages_made = list((tmp_path / "site").rglob("*.html"))
    assert len(pages_made) > 15
    for page in pages_made:
        text = page.read_text(encoding="utf-8")
        hosts = set(re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["'](https?://[^"']+)""", text))
        assert not hosts, f"{page.name} loads from {hosts}"
        assert "--8&lt;--" not in text
        assert "not run:" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_the_links_of_the_readmes_lead_somewhere() -> None:
    for page in PAGES[:2]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            place = ROOT / file if file else page
            assert place.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings}

"""The READMEs say what the records say."""

from __future__ import annotations

import re

from support import readme


def test_the_generated_parts_of_the_readmes_and_the_documentation_are_up_to_date() -> None:
    assert readme.main(["--check"]) == 0, "run make readme"


def test_both_readmes_have_the_same_sections_and_the_same_commands() -> None:
    english, chinese = ((readme.ROOT / name).read_text(encoding="utf-8") for name in readme.READMES)

    def skeleton(text: str) -> tuple[list[str], list[str], list[str]]:
        code = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        commands = [line.split("#")[0].strip() for block in code for line in block.splitlines()]
        return re.findall(r"^(#+) ", text, flags=re.MULTILINE), re.findall(r"<!-- .*? -->", text), commands

    assert skeleton(english) == skeleton(chinese)

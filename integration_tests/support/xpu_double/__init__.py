"""A FastDeploy of our own writing: who creates the KV tensors, as a source tree, for any launch rule and condition.

The fix reads source, so the double is written to disk: `write` fills a launch rule, a runner's condition and a
proposer's into templates. It needs neither Paddle nor NumPy; stand-ins of both are part of the tree.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from support.xpu_double import _engine, _worker

#: Launch rule by the name that the fix gives it; "8046" is that of the pull request: the flag is gone altogether.
LAUNCH = {
    "never": _engine.Launch(when="True", told="create_cache_tensor"),
    "cpu-blocks": _engine.Launch(when="cache_config.enable_hierarchical_cache", told="self.enable_splitwise == 0"),
    "cpu-blocks-or-storage": _engine.Launch(
        when="cache_config.kvcache_storage_backend or cache_config.num_cpu_blocks > 0",
        told="self.enable_splitwise == 0",
    ),
    "storage": _engine.Launch(
        when="cache_config.kvcache_storage_backend or cache_config.num_cpu_blocks > 0",
        told="self.enable_splitwise == 0 and cache_config.kvcache_storage_backend",
    ),
    "8046": _engine.Launch(when="cache_config.kvcache_storage_backend or cache_config.num_cpu_blocks > 0", told=""),
}

#: Condition by what it looks at; "7420" is what that pull request looks at, "role" what came before it.
CONDITION = {
    "role": 'self.fd_config.scheduler_config.splitwise_role == "mixed"',
    "cpu": 'self.scheduler_config.splitwise_role == "mixed" and self.fd_config.cache_config.num_cpu_blocks == 0',
    "7420": (
        'self.scheduler_config.splitwise_role == "mixed" and not self.cache_config.kvcache_storage_backend'
        " and self.cache_config.num_cpu_blocks == 0"
    ),
    "storage": 'self.scheduler_config.splitwise_role == "mixed" and not self.cache_config.kvcache_storage_backend',
}

#: Launch rule, runner's condition and proposer's condition of each known generation, by the tree that has it.
TREES = {
    "like-2.3": ("never", "role", None),
    "like-2.4": ("cpu-blocks", "role", "cpu"),
    "like-2.5": ("cpu-blocks-or-storage", "role", "7420"),
    "like-7420": ("cpu-blocks-or-storage", "7420", "7420"),
    "like-2.6": ("storage", "role", "storage"),
    "like-develop": ("storage", "storage", "storage"),
    "like-8046": ("8046", "role", "role"),
    "like-8046-unrepaired": ("8046", "storage", "storage"),
}


def write(root: Path, name: str, *, runner: str | None = None, changed: tuple[str, str, str] | None = None) -> Path:
    """Writes a tree.

    Args:
        root: Folder to write into.
        name: One of `TREES`.
        runner: Another runner's condition than the tree's own: one of `CONDITION`.
        changed: Module, text and replacement, for a source that nobody knows.

    Returns:
        The folder that holds the package.
    """
    launch, own, proposer = TREES[name]
    files = _engine.files(LAUNCH[launch]) | _worker.files(
        CONDITION[runner or own], CONDITION[proposer] if proposer is not None else None
    )
    folder = root / name
    for relative, text in files.items():
        text = textwrap.dedent(text)
        if changed is not None and relative == changed[0]:
            assert changed[1] in text, f"{changed[1]!r} is not in {relative}"
            text = text.replace(changed[1], changed[2])
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for parent in path.relative_to(folder).parents:
            if parent.parts and not (folder / parent / "__init__.py").exists():
                (folder / parent / "__init__.py").write_text("", encoding="utf-8")
    return folder

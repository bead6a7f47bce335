"""The command `kvmend`. Errors become one line and an exit code here and nowhere else."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence

import click

from kvmend import __version__
from kvmend.cli.output import reader_may_leave
from kvmend.errors import KvmendError

#: Each command: module and name in it. Only the one that is asked for is imported.
COMMANDS = {
    "list": ("catalogue", "list_command"),
    "explain": ("catalogue", "explain_command"),
    "check": ("check", "check_command"),
    "verify": ("verify", "verify_command"),
    "status": ("status", "status_command"),
    "hook": ("hook", "hook_command"),
    "demo": ("demo", "demo_command"),
    "fingerprint": ("fingerprint", "fingerprint_command"),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"kvmend.cli.{module}"), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvmend")
def cli() -> None:
    """Repairs known KV-cache bookkeeping faults of pinned vLLM and FastDeploy servers in place."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. Exit codes: 0 good, 1 something is not as wanted, 2 wrong usage, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; prints at most one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign shows another one; it is no reason to say nothing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = None
    try:
        with reader_may_leave():
            code = cli.main(args=arguments, prog_name="kvmend", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort:
        return _fail("interrupted", 130)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click has the class from 8.2 on
            click.echo(error.format_message())
            return 2
        usage = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        return _fail(f"{error.format_message()}{f' See {usage} --help.' if usage else ''}", error.exit_code)
    except KvmendError as error:
        return _fail(str(error), 2)
    except SystemExit as error:
        # 1 is click's own way with a reader that left while help was printed; whatever else it is, it was meant.
        return error.code if isinstance(error.code, int) and error.code != 1 else 0
    except Exception as error:  # nobody on call can use a traceback
        return _fail(f"internal error: {type(error).__name__}: {error}", 1)


def _fail(message: str, code: int) -> int:
    click.echo(f"kvmend: {' '.join(message.split())}", err=True)
    return code

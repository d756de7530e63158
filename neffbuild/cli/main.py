"""The `neffbuild` command: which commands there are, and how every one of them ends.

Commands are imported only when they run, so `--help` costs nothing of theirs.
"""

from __future__ import annotations

import importlib
import keyword
import logging
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import click

from neffbuild import __version__
from neffbuild.cli import logs, output
from neffbuild.config.errors import ConfigError, NeffbuildError

# Not `__name__`: that is `__main__` under `python -m`.
_log = logging.getLogger("neffbuild.cli.main")
_COMMANDS = {
    "plan": "What a serve config needs compiled, and what the cache already has.",
    "compile": "Compile what is missing into the local cache.",
    "push": "Copy a compiled config to a store and name it with a tag.",
    "pull": "Fetch what a tag names into the local cache.",
    "import": "Bring a cache, a pushed directory or a tar of one into the local cache.",
    "promote": "Make a tag name what another tag leads to, after checking it.",
    "verify": "Check artifacts against their digests and the config against its artifacts.",
    "gc": "Remove from a store what is of no use any more.",
    "report": "Compile time, memory and artifact size of every unit.",
    "merge-report": "One report of those that shards wrote.",
    "explain": "The recipe of a unit, ingredient by ingredient, or the difference of two.",
    "diff": "What differs between two tags of a store, or between a plan and an engine.",
    "inspect": "What a compiled file holds, and whether it is whole.",
    "replay": "Run decode steps through the dispatcher and count what they read.",
    "env": "The environment in which an engine serves from its filled cache.",
    "keygen": "Make a key pair to sign tags with.",
    "doctor": "What is installed, which toolchains can run here and why not.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # A module cannot be called `import`.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        module = importlib.import_module(f"neffbuild.cli.{name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="neffbuild")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe log line shown on stderr.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log lines as key=value text or as JSON objects.",
)
def cli(log_level: str, log_format: str) -> None:
    """Compile shape-bucketed decode graphs ahead of time, cache them, serve them warm.

    A command that needs a serve config takes it as its first argument, or a `vllm serve …` command
    line after `--`. Exit status: 0 done; 1 some unit failed or is missing; 2 the config or command
    line is wrong; 3 a store cannot be reached or refuses; 4 integrity or signature failure.
    """
    logs.configure(log_level, log_format)


def main() -> NoReturn:
    """Entry point of the console script; never returns, never shows a user a traceback."""
    arguments = sys.argv[1:]
    json_wanted = "--json" in _own_arguments(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal or log that cannot show an arrow shows its escape; JSON strings mean the same.
            stream.reconfigure(errors="backslashreplace")
    try:
        _require_working_directory()
        # Not `cli.main`: it takes any broken pipe, a compiler's or a store's, for that of the output.
        with cli.make_context("neffbuild", arguments) as context:
            status = cli.invoke(context)
    except click.exceptions.Exit as ended:
        status = ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        output.remark(error.format_message())
        status = 2
    except click.ClickException as error:
        status = _fail(_usage_error(error, arguments), json_wanted)
    except NeffbuildError as error:
        status = _fail(error, json_wanted)
    except (KeyboardInterrupt, click.exceptions.Abort):
        status = output.INTERRUPTED
    except Exception as error:
        if (limit := _limit(error)) is not None:
            status = _fail(limit, json_wanted)
        elif not _is_of_printing(error):
            status = _fail(_internal_error(error), json_wanted, status=output.INTERNAL)
        elif isinstance(error, BrokenPipeError):
            output.discard()
            status = 0
        else:
            output.discard()
            status = _fail(output.Unwritten.because(error), json_wanted)
    sys.exit(status if isinstance(status, int) else 0)


def _require_working_directory() -> None:
    try:
        Path.cwd()
    except OSError:
        raise ConfigError(
            "the working directory does not exist any more",
            hint="change to one that does; relative paths are relative to it",
        ) from None


def _is_of_printing(error: Exception) -> TypeGuard[OSError]:
    """Whether help could not be printed: click does that, which does not go through `output.write`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, OSError) and frame.name == click.echo.__name__


def _own_arguments(arguments: list[str]) -> list[str]:
    """What stands before `--`; the rest is somebody else's command line."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _usage_error(error: click.ClickException, arguments: list[str]) -> NeffbuildError:
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return ConfigError(error.format_message())
    hint = f"see `{context.command_path} --help`"
    option = getattr(error, "option_name", None)
    if context.parent is None and option in ("--json", "--cache"):
        return ConfigError(
            f"{option} stands before the command",
            field=option,
            hint=f"write it after: `neffbuild COMMAND … {option}`",
        )
    if "vllm" in arguments and "--" not in arguments:
        hint = "put `--` before a `vllm serve …` command line"
    return ConfigError(error.format_message(), field=_parameter(error), hint=hint)


def _parameter(error: click.ClickException) -> str | None:
    """The option or argument that a usage error is about, as it is spelled on the command line."""
    option: str | None = getattr(error, "option_name", None)
    if option is None and (parameter := getattr(error, "param", None)) is not None:
        option = parameter.opts[0]
    return option


def _limit(error: Exception) -> NeffbuildError | None:
    """What to say where the host lets no further thread or process be started."""
    if not isinstance(error, RuntimeError | BlockingIOError):
        return None
    from neffbuild.farm.causes import cause_of_refused_start

    cause = cause_of_refused_start(error)
    return NeffbuildError(cause.text, hint=cause.advice) if cause else None


def _internal_error(error: Exception) -> NeffbuildError:
    _log.debug("the traceback:", exc_info=error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return NeffbuildError(
        f"internal error, {type(error).__name__}: {error} ({Path(frame.filename).name}, "
        f"line {frame.lineno})",
        hint="this is a bug in neffbuild or in a toolchain; `neffbuild --log-level debug …` shows where",
    )


def _fail(error: NeffbuildError, json_wanted: bool, status: int | None = None) -> int:
    as_text = not json_wanted or isinstance(error, output.Unwritten)
    try:
        if not as_text:
            output.print_json(output.error_document(error))
    except output.Unwritten as unwritten:
        output.remark(output.error_text(unwritten))
        as_text = True
    if as_text:
        output.remark(output.error_text(error))
    return error.exit_status if status is None else status


if __name__ == "__main__":
    main()

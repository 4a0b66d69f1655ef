"""The command ``headrace``: parses the command line, runs the command, and turns errors into one line and exit code 2.

Refuses: torch, and importing what a command does not need, so that ``--help`` prints at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from typing import NoReturn

from headrace.base import VERSION, env
from headrace.base.errors import EngineUnavailable, HeadraceError
from headrace.base.option import suggest
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import parse_command, print_error
from headrace.serving.cli.layout import lay_out, terminal_width, wrap

FAILURE, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
LAST_STREAM = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    """Run ``argv``, by default this process's arguments. Returns the exit code: 0, 1 if part of the work failed or the
    engine was lost, 2 for errors. When Ctrl-C ends this process's command, the process exits here, with its
    threads and compilers."""
    is_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    _fill_standard_streams()
    is_debugging = False
    try:
        name, rest = _find_command(argv)
        if name is None:
            print(overview())
            return 0
        invocation = parse_command(COMMANDS[name], rest)
        level = invocation.given.get("log_level", "warning" if invocation.command.quiet else "info")
        is_debugging = level == "debug"
        _start_logging(level)
        env.disable_plugins(invocation.given.get("disable_models", ""))
        return invocation.command.load()(invocation)
    except HeadraceError as error:
        if is_debugging:
            raise
        print_error(str(error))
        return FAILURE if isinstance(error, EngineUnavailable) else USER_ERROR
    except KeyboardInterrupt:
        if is_process:
            _leave(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        # A full disk is the user's to fix: one line. Anything else is a defect and keeps its traceback.
        if error.errno not in FULL:
            raise
        _discard_output()
        print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}")
        return USER_ERROR


def _discard_output() -> None:
    """Redirect standard output to the null device after a failed write, so that flushing the rest at exit does not
    fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> NoReturn:
    from headrace.service.ending import leave

    with contextlib.suppress(OSError):  # the reader is gone
        sys.stdout.flush()
        sys.stderr.flush()
    leave(code)


def _fill_standard_streams() -> None:
    """Open closed standard streams. Otherwise the next socket would get the descriptor, ``print`` would write to it,
    and libraries would refuse to close it."""
    # `open` returns the lowest free descriptor, so this fills 0 to 2 and stops at the first one above.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= LAST_STREAM:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _find_command(argv: list[str]) -> tuple[str | None, list[str]]:
    """The command's name, of one or two words, and the other arguments; None for help."""
    if argv[1:] and argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        return None, []
    if argv[0] in ("-V", "--version"):
        print(f"headrace {VERSION}")
        raise SystemExit(0)
    # the longer name first: ``bench serve`` before a command ``bench``
    for count in (2, 1):
        name = " ".join(argv[:count])
        if name in COMMANDS:
            return name, argv[count:]
    family = [name for name in COMMANDS if name.startswith(argv[0] + " ")]
    if family and argv[1:] in ([], ["-h"], ["--help"]):
        print(overview(argv[0]))
        raise SystemExit(0 if argv[1:] else USER_ERROR)
    wanted = " ".join(argv[:2]) if family else argv[0]
    hint = suggest(wanted, COMMANDS, otherwise=f"; commands are {', '.join(family or COMMANDS)}")
    raise HeadraceError(f"unknown command {wanted!r}{hint}")


def overview(first_word: str = "") -> str:
    """The list of commands."""
    width = terminal_width()
    chosen = [c for c in COMMANDS.values() if c.name.startswith(first_word)]
    lines = [f"usage: headrace {first_word or 'COMMAND'} [flags]", "", "Serve large language models.", "", "commands:"]
    lines += lay_out(((c.name, c.summary) for c in chosen), width)
    lines += ["", *wrap("headrace COMMAND --help documents every flag; headrace --version prints the version.", width)]
    lines += ["", "start here:"]
    for command in chosen[:3]:
        lines += [line for comment, example in command.examples[:1] for line in (f"  # {comment}", f"  {example}")]
    if not first_word:
        lines += ["", "environment:", *lay_out(sorted(env.VARIABLES.items()), width)]
    return "\n".join(lines)


def _start_logging(level: str) -> None:
    env.set_log_level(level)
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


if __name__ == "__main__":
    sys.exit(main())

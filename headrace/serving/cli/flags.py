"""Command-line flags made from documented options. Precedence: flag, environment, file, default.

Refuses: running commands.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.base.option import OptionInfo, options_of
from headrace.base.peer_options import explain_unknown, spell_keyword
from headrace.serving.cli.commands import Command
from headrace.serving.cli.layout import terminal_width, wrap

MAX_FILE_BYTES = 1 << 20
# option: (variable, reader); only these options can be set by the environment
_ENVIRONMENT = {
    "threads": ("OMP_NUM_THREADS", env.omp_num_threads), "api_key": ("HEADRACE_API_KEY", env.api_key),
    "log_level": ("HEADRACE_LOG_LEVEL", env.log_level),
}


@dataclass(frozen=True)
class Invocation:
    """A parsed command line. ``given`` has every option that was set, ``sources`` where each came from: ``flag``,
    ``environment NAME`` or ``file PATH``; ``words`` are the positional arguments."""

    command: Command
    given: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def section(self, name: str) -> Any:
        """One section with its values; raises `ConfigError` for an invalid value."""
        kind = self.command.section_types()[name]
        return kind(**{info.name: self.given[info.name] for info in options_of(kind, name) if info.name in self.given})

    def given_in(self, sections: tuple[str, ...]) -> dict[str, Any]:
        """The options that were set, of some sections."""
        names = {info.name for name in sections for info in options_of(self.command.section_types()[name], name)}
        return {name: value for name, value in self.given.items() if name in names}


def command_options(command: Command) -> list[OptionInfo]:
    """Every option of a command."""
    return [info for name, kind in command.section_types().items() for info in options_of(kind, name)]


def parse_command(command: Command, argv: list[str]) -> Invocation:
    """Parse a command's arguments. Raises `ConfigError` for invalid ones, naming the nearest flag, and `SystemExit`
    after ``--help``."""
    infos = {info.name: info for info in command_options(command)}
    parsed, rest = build_parser(command).parse_known_args(argv)
    if rest:
        raise _unknown(rest[0], infos)
    values = vars(parsed)
    words = values.pop("words", None) or []
    words = [words] if isinstance(words, str) else words
    flags = {name: _read_value(infos[name], value) for name, value in values.items()}
    if command.words == "model" and words:
        if flags.setdefault("model", words[0]) != words[0]:
            raise ConfigError(f"the model is given twice: {words[0]} and --model {flags['model']}", param="model")
        words = []
    given, sources = _merge(infos, flags)
    for name, value in given.items():
        infos[name].check(value)
    return Invocation(command, given, sources, words)


def _merge(infos: dict[str, OptionInfo], flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply file, environment and flags in this order: later ones win."""
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = flags.get("config")
    layers = [(f"file {path}", read_options_file(Path(path), infos))] if path else []
    for name, (variable, read) in _ENVIRONMENT.items():
        value = read() if name in infos else None
        if value is not None and value != infos[name].default:
            layers.append((f"environment {variable}", {name: value}))
    layers.append(("flag", flags))
    for source, values in layers:
        given.update(values)
        sources.update(dict.fromkeys(values, source))
    return given, sources


def read_options_file(path: Path, infos: dict[str, OptionInfo]) -> dict[str, Any]:
    """Options from a TOML or JSON file, flat or in tables named after sections. Options of other commands are skipped,
    so that commands can share a file; unknown ones raise `ConfigError`."""
    content = _read_file(path)
    flat: dict[str, Any] = {}
    for key, value in content.items():
        # Names of options are unique over all sections, so tables can be merged.
        flat.update(value if isinstance(value, dict) else {key: value})
    aliases = {info.alias.replace("-", "_"): info.name for info in infos.values() if info.alias}
    found = {}
    for key, value in flat.items():
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in infos:
            if name in _names_of_all_commands():
                continue
            hint = explain_unknown(name, infos, spell_keyword)
            raise ConfigError(f"{path}: unknown option {key!r}{hint}", param=name)
        found[name] = value
    found.pop("config", None)
    return found


def _names_of_all_commands() -> set[str]:
    from headrace.serving.cli.commands import COMMANDS

    return {info.name for command in COMMANDS.values() for info in command_options(command)}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # may be a pipe, whose size is unknown
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", param="config")
        is_json = path.suffix == ".json" or data.lstrip().startswith(b"{")  # as nothing in TOML begins
        content = json.loads(data) if is_json else tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="config") from error
    except ValueError as error:  # includes ConfigError, which is raised unchanged
        if isinstance(error, ConfigError):
            raise
        kind = "JSON" if is_json else "TOML (option files are TOML unless named .json)"
        raise ConfigError(f"{path} is not valid {kind}: {error}", param="config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object of options", param="config")
    return content


def _read_value(info: OptionInfo, text: Any) -> Any:
    """A flag's text converted to the option's type."""
    if info.takes_many and isinstance(text, list):
        return " ".join(text)
    if not isinstance(text, str) or info.type is str:
        return text
    if info.optional and text.lower() == "none":
        return None
    try:
        return info.type(text)
    except ValueError as error:
        kind = {"int": "a whole number", "float": "a number"}.get(info.type.__name__, info.type.__name__)
        raise ConfigError(f"{info.flag} takes {kind}, got {text!r}", param=info.name) from error


def _unknown(word: str, infos: dict[str, OptionInfo]) -> ConfigError:
    name = word.split("=")[0]
    if not name.startswith("-"):
        return ConfigError(f"unexpected argument {word!r}", param=name)
    known = {*infos, *(f"no_{info.name}" for info in infos.values() if info.type is bool)}
    hint = explain_unknown(name.lstrip("-").replace("-", "_"), known, _spell_flag)
    return ConfigError(f"unknown flag {name}{hint or '; --help lists all flags'}", param=name)


def _spell_flag(option: str) -> str:
    return "--" + option.replace("_", "-")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line at a hyphen: a name such as ``cache-aware`` has to be found and copied. Flags with several names
    have their value once, as from Python 3.13 on."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, default)}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "needs a value")
        raise ConfigError(re.sub(r"ignored explicit argument .*", "takes no value", message))


def build_parser(command: Command) -> argparse.ArgumentParser:
    """The parser of one command, with a group of flags per section. Values stay text, and nothing has a default: only
    options that the user set appear in the result."""
    width = terminal_width()
    summary = command.summary[0].upper() + command.summary[1:] + "."
    parser = _Parser(
        prog=f"headrace {command.name}",
        description="\n".join([summary, *(["", *wrap(command.about, width)] if command.about else [])]),
        allow_abbrev=False, add_help=False,
        argument_default=argparse.SUPPRESS, epilog=_epilog(command),
        formatter_class=lambda prog: _Formatter(prog, max_help_position=32, width=width),
        usage=f"headrace {command.name} {_WORDS[command.words].usage + ' ' if command.words else ''}[flags]",
    )
    if command.words:
        how = _WORDS[command.words]
        parser.add_argument("words", nargs=how.count, metavar=how.metavar, help=how.help)
    for name, kind in command.section_types().items():
        about = " ".join((kind.__doc__ or "").replace("``", "").split())
        group = parser.add_argument_group(name, "\n".join(textwrap.wrap(about, width - 2)))
        for info in options_of(kind, name):
            _add_flag(group, info)
        if name == "general":
            group.add_argument("-h", "--help", action="help", help="show this and exit")
    return parser


@dataclass(frozen=True)
class _Words:
    """Positional arguments of a command: how help texts show them, and how many argparse takes."""

    usage: str
    metavar: str
    help: str
    count: str = "*"


_WORDS = {
    "model": _Words("[MODEL]", "MODEL", "the same as --model", "?"),
    "checked": _Words("[MODEL]", "MODEL", "how its weights are stored, and what multiplies with them here", "?"),
    "prompts": _Words("[PROMPT ...]", "PROMPT", "prompts to complete"),
    "files": _Words("INPUT OUTPUT", "FILE", "the input, then the output"),
    "folder": _Words("FOLDER", "FOLDER", "folder, or one of its files"),
    "folders": _Words("[FOLDER ...]", "FOLDER", "folders to search; default: the current one"),
    "urls": _Words("[URL ...]", "URL", "workers, such as http://10.0.0.1:8000"),
    "name": _Words("NAME", "NAME", "OWNER/NAME on the hub; also OWNER/NAME:Q4_K_M and OWNER/NAME/FILE.gguf"),
}


def _epilog(command: Command) -> str | None:
    lines = ["examples:"]
    for comment, example in command.examples:
        lines += [f"  # {comment}", f"  {example}"]
    return "\n".join(lines) if command.examples else None


def _add_flag(group: Any, info: OptionInfo) -> None:
    help_text = describe(info).replace("%", "%%")
    names = [f"-{info.letter}", info.flag] if info.letter else [info.flag]
    names += [f"--{info.alias}"] if info.alias else []
    if info.type is bool:
        group.add_argument(*names, dest=info.name, action=argparse.BooleanOptionalAction, help=help_text)
    else:
        action = "append" if info.type is list else "extend" if info.takes_many else "store"
        name = value_name(info).removesuffix("...").rstrip()
        count = "+" if info.takes_many else None
        group.add_argument(*names, dest=info.name, action=action, nargs=count, metavar=name, help=help_text)


def value_name(info: OptionInfo) -> str:
    """The placeholder of the value in help texts."""
    if info.choices and info.metavar is None:
        return "{" + ",".join(map(str, info.choices)) + "}"
    return info.metavar or {"int": "N", "float": "X"}.get(info.type.__name__, "TEXT")


def describe(info: OptionInfo) -> str:
    """An option's help text, with its default."""
    if info.default is None or info.default == "":
        return info.doc
    shown = ("on" if info.default else "off") if info.type is bool else info.default
    return f"{info.doc} (default: {shown})"


def print_error(message: str) -> None:
    """Print one line to stderr."""
    print(f"headrace: error: {message}", file=sys.stderr)

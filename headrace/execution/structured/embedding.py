"""`embed_lark`: a request's grammar in Lark for the inside of a JSON string, as a part of a larger grammar.

JSON writes each character of the text as itself or as an escape. llguidance's lexer takes as much as a terminal can
match and never goes back: one that may go on with one escape would take the backslash of another. So terminals become
rules whose terminals are escapes, or characters that are written as themselves. Refuses: what has no such form.
"""

from __future__ import annotations

import json
import re
import unicodedata
import warnings
from collections.abc import Iterator

from headrace.base.errors import RequestError
from headrace.execution.structured.sources import check_ebnf, check_regex, quote, slash

ESCAPES = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
"""Characters that are written as a backslash and another one."""
COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"', "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*", "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
}
"""Lark's common terminals that may hold characters of `ESCAPES`."""
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<range>"(?:\\.|[^"\\])"\s*\.\.\s*"(?:\\.|[^"\\])")"""
    r"""|(?P<string>"(?:\\.|[^"\\])*"i?)|(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)"""
    r"""|%\s*import\s+common\s*(?P<several>\([^)]*\)|\.\s*(?P<one>\w+)(?:\s*->\s*(?P<name>\w+))?)"""
    r"""|(?P<terminal>\b_*[A-Z][A-Z0-9_]*\b)|(?P<word>[a-z_][\w-]*|[\s:|()*+?.,!>-]+|\d+|\{[\d,\s]*\}|~|\[|\])"""
    r"""|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ATOM = re.compile(
    r"(?P<open>\((?:\?:|\?P?<\w+>)?(?!\?))|(?P<close>\))|(?P<either>\|)|(?P<count>[*+?]|\{\d*,?\d*\})|(?P<anchor>[\^$])"
    r"|(?P<category>\\[pP](?:\{\w+\}|\w))|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|(?P<bracket>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<char>[^(\\])",
    re.DOTALL,
)
_NO_TEXT = r'[\x00-\x1F"\\\x7F]'
"""What no JSON string holds as itself."""
_SAMPLE = "".join(c for c in map(chr, range(0x20, 0x600)) if c not in ESCAPES and c != "\x7f") + "日本語😀"
_CATEGORY = re.compile(r"[A-Z][a-z]?")
_ZERO_WIDTH = ("\\b", "\\B", "\\A", "\\Z", "\\z", "\\G")


def embed_lark(definition: str, param: str) -> str:
    """The right side of a rule in llguidance's dialect of Lark. Raises `RequestError` naming ``param``."""
    check_ebnf(definition, param)
    prefix = next(p for p in ("t-", "u-", *(f"t{i}-" for i in range(len(definition)))) if p not in definition)
    names: dict[str, str] = {}
    parts: list[str] = []
    for found in _TOKEN.finditer(definition):
        kind = str(found.lastgroup)
        if kind == "terminal":
            parts.append(names.setdefault(found[0], f"{prefix}{len(names)}"))
        elif kind in ("one", "name", "several"):
            for own, name in _read_import(found):
                rule = names.setdefault(name, f"{prefix}{len(names)}")
                body = write_regex(COMMON[own], "", param) if own in COMMON else own
                parts.append(f"\n{rule}: {body}\n" + ("" if own in COMMON else f"%import common.{own}\n"))
        else:
            parts.append(_rewrite(kind, found[0], param))
    return "%lark {\n" + "".join(parts) + "\n}"


def _read_import(found: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a common terminal and the name that the grammar gives it."""
    if found["one"]:
        yield found["one"], found["name"] or found["one"]
    else:
        yield from ((name, name) for name in re.findall(r"\w+", found["several"]))


def _rewrite(kind: str, text: str, param: str) -> str:
    match kind:
        case "comment":
            return ""
        case "range":
            first, last = (_read_string(part, param) for part in re.split(r'(?<=")\s*\.\.\s*(?=")', text))
            return write_regex(f"[{re.escape(first)}-{re.escape(last)}]", "", param)
        case "string" if text.endswith("i"):
            return write_regex(re.escape(_read_string(text[:-1], param)), "i", param)
        case "string":
            return _constant(_read_string(text, param))
        case "regex":
            body, _, flags = text[1:].rpartition("/")
            return write_regex(body.replace(r"\/", "/"), flags, param)
        case "word":
            return text
    raise RequestError(
        f"{param}: {text!r} is not taken in a grammar of a tool's input: rules, terminals, strings, regular "
        "expressions, repetitions and %import common are", param=param
    )


def _read_string(text: str, param: str) -> str:
    try:
        value: str = json.loads(text, strict=False)
    except ValueError as error:
        raise RequestError(f"{param}: the string {text[:40]} has an escape that JSON has not", param=param) from error
    return value


def _constant(text: str) -> str:
    return quote(json.dumps(text, ensure_ascii=False)[1:-1])


def write_regex(pattern: str, flags: str, param: str) -> str:
    """A regular expression (Rust's syntax, with the ``flags`` i and s) as an expression of rules: of what JSON strings
    write for the texts that it matches. Raises `RequestError`."""
    check_regex(pattern, param)
    if not set(flags) <= {"i", "s"}:
        raise RequestError(f"{param}: the flags {flags!r} are not taken in a grammar of a tool's input", param=param)
    atoms, at = [], 0
    while at < len(pattern):
        found = _ATOM.match(pattern, at)
        if found is None:
            raise RequestError(f"{param}: {pattern[at : at + 40]!r} in a regular expression is not taken", param=param)
        atoms.append((str(found.lastgroup), found[0]))
        at = found.end()
    if atoms and atoms[0] == ("anchor", "^"):
        del atoms[0]
    if atoms and atoms[-1] == ("anchor", "$"):
        del atoms[-1]
    return "(" + "".join(_write_atoms(atoms, flags, param)) + ")"


def _write_atoms(atoms: list[tuple[str, str]], flags: str, param: str) -> Iterator[str]:
    last = "either"
    for index, (kind, atom) in enumerate(atoms):
        if kind in ("either", "close") and last in ("either", "open"):
            yield '""'
        if kind == "count":
            # lazy and greedy are the same language
            yield "" if last == "count" and atom == "?" else atom
        elif kind in ("open", "close", "either"):
            yield {"open": " (", "close": ")", "either": " | "}[kind]
        elif kind == "anchor" or atom in _ZERO_WIDTH:
            raise RequestError(f"{param}: {atom} is taken at the ends of a regular expression alone", param=param)
        else:
            following = atoms[index + 1] if index + 1 < len(atoms) else ("", "")
            yield " " + _write_atom(kind, atom, flags, param, is_run=following in (("count", "*"), ("count", "+")))
        last = kind
    if last in ("either", "open"):
        yield '""'


def _write_atom(kind: str, atom: str, flags: str, param: str, *, is_run: bool) -> str:
    """One character of a set; or with ``is_run`` several where they are written as themselves: the atom is repeated."""
    if kind == "char" and atom == ".":
        atom, kind = ("[\\s\\S]" if "s" in flags else "[^\\n]"), "bracket"
    specials = _find_specials(kind, atom, param)
    options = [_constant(c) for c in specials]
    if kind == "category" or _compile(atom, param).search(_SAMPLE) or not specials:
        plain = slash(f"[{atom}--{_NO_TEXT}]" + "+" * is_run)
        options.append(plain + "i" * ("i" in flags))
    return "(" + " | ".join(options) + ")"


def _find_specials(kind: str, atom: str, param: str) -> list[str]:
    """Those characters of `ESCAPES` that an atom matches."""
    if kind != "category":
        return [c for c in ESCAPES if _compile(atom, param).fullmatch(c)]
    name = atom[2:].strip("{}")
    if not _CATEGORY.fullmatch(name):
        raise RequestError(
            f"{param}: {atom} is not taken in a grammar of a tool's input; general categories such as \\p{{L}} are",
            param=param
        )
    return [c for c in ESCAPES if unicodedata.category(c).startswith(name) == (atom[1] == "p")]


def _compile(atom: str, param: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(atom if atom[0] in "[\\" else re.escape(atom))
    except (re.error, FutureWarning) as error:
        raise RequestError(f"{param}: {atom[:40]!r} in a regular expression: {error}", param=param) from error

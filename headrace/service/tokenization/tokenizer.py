"""`Tokenizer`: text to ids and back, and the chat template. Torch-free; made by ``loading.load_tokenizer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from headrace.base.errors import RequestError
from headrace.service.tokenization.bounds import NO_BOUND, TokenBound, find_bound
from headrace.service.tokenization.chat_template import ChatTemplates
from headrace.service.tokenization.pieces import AROUND, Encoder, encode_end, encode_pieces
from headrace.service.tokenization.text_decoder import TextDecoder
from headrace.service.tokenization.token_bytes import TokenBytes

BRIEF_TEXT = 4_000
"""Characters above which the call that releases the GIL, and finds no offsets, is the faster one."""
LONG_TEXT = 20_000
"""Characters above which encoding would block an event loop for too long: such texts are encoded on a thread."""
IDS_AT_ONCE = 1 << 16
MAX_MARKED = 64
LETTERS_READ, CUT_TOKENS = 8, 64
"""Characters encoded per id looked for (more than most texts have per id), and how many ids may change at a cut."""


GAP_MARKS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
"""Tokens before the prompt, before the suffix, and where the model fills in; without the last one the suffix comes
first."""


@dataclass(frozen=True)
class GapMarks:
    """Ids of `GAP_MARKS`."""

    prefix: int
    suffix: int
    middle: int | None = None

    def fill(self, before: list[int], after: list[int]) -> list[int]:
        """The prompt for the text between ``before`` and ``after``."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


@dataclass(frozen=True)
class TokenizerFacts:
    """A model's tokenizer configuration beside the vocabulary. ``names`` maps ``bos_token``, ``eos_token``,
    ``unk_token``, ``pad_token`` … to the token's text. ``add_bos``/``add_eos``: whether they are put around a text;
    None leaves that to the vocabulary's post-processor. ``eos_ids`` end a generation."""

    names: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    eos_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to ids and back for one model. Safe to use from several threads. ``chat`` renders messages where the model's
    format is code instead of a template."""

    def __init__(self, backend: Backend, facts: TokenizerFacts, chat: ChatTemplates | None = None):
        backend.no_truncation()  # tokenizer.json may carry the settings of training
        backend.no_padding()
        self._backend = backend
        self._facts = facts
        self.bytes_table = TokenBytes(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = self._id_of("bos_token")
        eos_id = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys(i for i in (eos_id, *facts.eos_ids) if i is not None and i >= 0))
        self._before, self._after = self._surroundings(eos_id)
        self._marked: dict[tuple[tuple[str, ...], int], bytes] = {}
        self._chat = chat or ChatTemplates(facts.chat_templates, facts.names)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.texts)

    @property
    def chat_templates(self) -> list[str]:
        """The texts of the model's chat templates."""
        return self._chat.texts

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._chat.takes_tools

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Ids of the text. Special tokens written out in it are recognised. ``add_special_tokens`` adds what the model
        expects around a text (begin of text …); false after a chat template, which writes them itself. ``limit``: most
        ids, the added ones included; the end of the text is cut off."""
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        room = None if limit is None else max(0, limit - len(before) - len(after))
        return [*before, *self._encode_bare(text, room)[:room], *after]

    def encode_within(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int] | None:
        """Ids as of `encode`, or None when a long text certainly has more than ``most``, which encoding a prefix
        shows. A short text, or one with hardly more ids, is encoded and returned: callers check the length."""
        if self.bound.proves_more(text, most):
            return None
        length = LETTERS_READ * (most + CUT_TOKENS)
        while length < len(text):
            # The last ids of a prefix may merge with what follows; `CUT_TOKENS` more than ``most`` is proof.
            if len(self._encode_bare(text[:length])) > most + CUT_TOKENS:
                return None
            length *= LETTERS_READ
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_ends(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        """Ids as of `encode`; for a long text its first id (or the one added before it) and at least ``most`` of its
        last ids, without encoding the middle."""
        length = LETTERS_READ * (most + CUT_TOKENS)
        if len(text) <= 2 * length:
            return self.encode(text, add_special_tokens=add_special_tokens)
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        last = encode_end(text, most, self._encoder, length=length)
        if last is None:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return [*(before[:1] or self._encode_piece(text[:AROUND])[:1]), *last, *after]

    def encode_pieces(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Ids as of `encode`, some ten thousand at a time."""
        yield self._before if add_special_tokens else []
        yield from encode_pieces(text, self._encoder)
        yield self._after if add_special_tokens else []

    def encode_pair(self, first: str, second: str, *, limit: int | None = None) -> tuple[list[int], int]:
        """Ids of two texts as one input, with the special ids around and between them, and the index of the second
        text's first id. ``limit``: most ids in all; see `cut_longest` for what is cut."""
        before, between, after = self._pair_surroundings
        room = None if limit is None else max(0, limit - len(before) - len(between) - len(after))
        one, two = self._encode_bare(first, room), self._encode_bare(second, room)
        if room is not None:
            kept = cut_longest(len(one), len(two), room)
            one, two = one[: kept[0]], two[: kept[1]]
        return [*before, *one, *between, *two, *after], len(before) + len(one) + len(between)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; wrong or incomplete characters become U+FFFD."""
        pieces = (ids[i : i + IDS_AT_ONCE] for i in range(0, len(ids), IDS_AT_ONCE))  # other threads run between
        return "".join(self.decode_pieces(pieces, skip_special_tokens=skip_special_tokens))

    def decode_pieces(self, pieces: Iterable[Sequence[int]], *, skip_special_tokens: bool = True) -> Iterator[str]:
        """Text as of `decode`, of ids that come in pieces."""
        decoder = TextDecoder(self.bytes_table, skip_special_tokens=skip_special_tokens)
        yield from map(decoder.push, pieces)
        yield decoder.finish()

    def token_text(self, token_id: int) -> str:
        """Text of one token amid others, special or not; U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token amid others; empty for an id beyond the vocabulary."""
        return self.bytes_table.later[token_id]

    def special_id(self, text: str) -> int | None:
        """Id of the special token that is written so, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.bytes_table.special_ids else None

    @property
    def begins_with_bos(self) -> bool:
        """Whether a text begins with the bos token."""
        return self.bos_id is not None and self._before[:1] == [self.bos_id]

    @cached_property
    def gap_marks(self) -> GapMarks | None:
        """The tokens with which the model fills in the middle, None without."""
        for texts in GAP_MARKS:
            ids = [self._backend.token_to_id(text) for text in texts]
            if None not in ids:
                return GapMarks(*(number for number in ids if number is not None))
        return None

    def mark_tokens(self, texts: tuple[str, ...], vocab_size: int) -> bytes:
        """A bit per token of a vocabulary, the least significant of a byte first: 1 where the token holds one of the
        texts, and for the last token of a text that is several. The first call reads the whole vocabulary."""
        found = self._marked.get((texts, vocab_size))
        if found is not None:
            return found
        marked = bytearray(-(-vocab_size // 8))
        for text in texts:
            ids = self.encode(text, add_special_tokens=False)
            for token_id in (*self.bytes_table.find(text.encode()), *(ids[-1:] if len(ids) > 1 else ())):
                if token_id < vocab_size:
                    marked[token_id >> 3] |= 1 << (token_id & 7)
        if len(self._marked) >= MAX_MARKED:  # the texts come from requests
            self._marked.clear()
        return self._marked.setdefault((texts, vocab_size), bytes(marked))

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None, template: str | None = None, **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of the messages; encode it without special tokens.

        ``template`` is the name of one of the model's templates, or a template's text. ``variables`` are passed on to
        it. Raises `RequestError` naming what is wrong with the messages or the template.
        """
        return self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            tools=tools,
            template=template, variables=variables,
        )

    def _encode_bare(self, text: str, enough: int | None = None) -> list[int]:
        """Ids of a text; of a long one at least ``enough`` of the first."""
        ids: list[int] = []
        for piece in encode_pieces(text, self._encoder):
            ids += piece
            if enough is not None and len(ids) >= enough:
                break
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        try:
            if len(text) > BRIEF_TEXT:  # the batch call releases the GIL, the one for a single text does not
                return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}", param="prompt") from error

    @cached_property
    def bound(self) -> TokenBound:
        """How much text one id can stand for. Takes 0.1 s or more with a large vocabulary, when first asked."""
        return find_bound(self._backend) or NO_BOUND

    @cached_property
    def _encoder(self) -> Encoder:
        unknown = self._backend.token_to_id(self._facts.names.get("unk_token", ""))
        return Encoder(lambda text: self._encode_piece(text), self._starts, unknown)

    def _starts(self, text: str) -> list[int]:
        """Positions at which tokens begin; of the parts of one character, the first."""
        # The batch call releases the GIL; the fast one knows no offsets.
        return sorted({start for start, _ in self._backend.encode_batch([text], add_special_tokens=False)[0].offsets})

    @cached_property
    def _pair_surroundings(self) -> tuple[list[int], list[int], list[int]]:
        """Ids before, between and after two texts. The post-processor shows them on two probe texts; without one there
        is nothing between."""
        one, two = self._encode_bare("a"), self._encode_bare("b")
        full = self._backend.encode("a", "b", add_special_tokens=True).ids
        starts = [i for i in range(len(full)) if full[i : i + len(one)] == one]
        ends = [i for i in range(len(full)) if full[i : i + len(two)] == two]
        if not starts or not ends or full == [*one, *two]:
            return self._before, [], self._after
        return self._before, full[starts[0] + len(one) : ends[-1]], full[ends[-1] + len(two) :]

    def _id_of(self, name: str) -> int | None:
        text = self._facts.names.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _surroundings(self, eos_id: int | None) -> tuple[list[int], list[int]]:
        """Ids before and after a text: those of the post-processor, found with a probe text, then bos and eos as the
        configuration says."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
        before, after = full[:start], full[start + len(bare):]
        if self._facts.add_bos is not None and self.bos_id is not None:
            before = [self.bos_id] * self._facts.add_bos + [i for i in before if i != self.bos_id]
        if self._facts.add_eos is not None and eos_id is not None:
            after = [i for i in after if i != eos_id] + [eos_id] * self._facts.add_eos
        return before, after


def cut_longest(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts cut to ``room`` together (the ``longest_first`` strategy of Hugging Face): the longer is cut
    until both are equal, then both in turn."""
    short, long = min(first, second), max(first, second)
    if short + long > room:
        long = max(short, room - short)
        if short + long > room:
            short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)

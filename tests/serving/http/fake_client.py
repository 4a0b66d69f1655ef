"""A fake engine client: real streams, deterministic tokens, a tokenizer whose ids are bytes."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec

from headrace.base.adapters import AdapterInfo, ListAdapters, LoadAdapter, UnloadAdapter
from headrace.base.admin import VITAL_PARTS, AcquireMemory, ReleaseMemory, StopProfile
from headrace.base.config import EngineConfig
from headrace.base.errors import ContextLengthExceeded, EngineUnavailable, HeadraceError, RequestError
from headrace.base.media import MediaItem
from headrace.base.media_facts import MediaFacts, check_media
from headrace.base.messages import (
    Abort,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    Finish,
    MemoryLine,
    ModelFacts,
    RequestOutput,
)
from headrace.base.pooling import PoolingFacts, PoolingSpec, pack_floats
from headrace.base.sampling import SamplingParams, SamplingSpec, StopSpec
from headrace.base.step import TokenLogprobs
from headrace.service.client.client import NO_TAGS
from headrace.service.client.media import MediaPrompt
from headrace.service.client.outputs import ChoiceDelta, ReplicaStatus
from headrace.service.client.prompts import open_request
from headrace.service.client.requests import check_ids, refuse_generation
from headrace.service.client.stream import RequestStream
from headrace.service.tokenization.bounds import TokenBound
from headrace.service.tokenization.tokenizer import GapMarks

BOS, EOS, VOCAB, MAX_LEN = 256, 257, 300, 4096
QUEUED_S = 0.002


BYTES = {token_id: bytes([token_id]) for token_id in range(256)}
SPECIAL = {token_id: f"<{token_id}>".encode() for token_id in range(256, VOCAB)}
BYTES_TABLE = SimpleNamespace(
    first=BYTES | SPECIAL, later=BYTES | SPECIAL, plain=BYTES | dict.fromkeys(SPECIAL, b""),
    special_ids=frozenset(SPECIAL), errors="replace", strip_start=0,
)


class ByteTokenizer:
    """Ids are bytes; 256 begins a text. Keeps what was rendered last; ``ending`` ends every prompt."""

    ending = ""

    vocab_size = VOCAB
    bound = TokenBound(1)
    bos_id = BOS
    eos_ids = (EOS,)
    has_chat_template = True
    chat_templates: tuple[str, ...] = ()
    takes_tools = False
    bytes_table = BYTES_TABLE

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        return ([BOS] * add_special_tokens + list(text.encode()))[:limit]

    def encode_within(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_ends(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_pieces(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        yield [BOS] * add_special_tokens
        yield from ([byte] for byte in text.encode())

    def encode_pair(self, first: str, second: str, *, limit: int | None = None) -> tuple[list[int], int]:
        return [BOS, *first.encode(), EOS, *second.encode()][:limit], len(first.encode()) + 2

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text = b"".join(
            bytes([i]) if i < 256 else b"" if skip_special_tokens else self.token_text(i).encode() for i in ids
        )
        return text.decode(errors="replace")

    def decode_pieces(self, pieces: Iterable[list[int]], *, skip_special_tokens: bool = True) -> Iterator[str]:
        yield self.decode([i for piece in pieces for i in piece], skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace") if token_id < 256 else f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    begins_with_bos = True
    marked: tuple[str, ...] = ()

    def mark_tokens(self, texts: tuple[str, ...], vocab_size: int) -> bytes:
        self.marked = texts
        return bytes(-(-vocab_size // 8))

    gap_marks: GapMarks | None = None

    def render_chat(
        self, messages, *, add_generation_prompt=True, continue_final_message=False, tools=None, template=None,
        **options
    ) -> str:
        self.messages, self.tools, self.options = messages, tools, options
        if template is not None:
            return f"{template}:{len(messages)}"
        if options.get("fail"):
            raise RequestError("the chat template refused the messages", param="messages")
        lines = [f"{m['role']}: {show_content(m['content'])}" for m in messages]
        return "\n".join(lines) + (
            "\nassistant:" if add_generation_prompt else "" if continue_final_message else "\n"
        ) + self.ending


def show_content(content: str | list[dict[str, str]]) -> str:
    """Text, with marks where media stand."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def draw_token(prompt_ids: list[int], seed: int, index: int) -> int:
    """The token the fake model draws: a letter or a space."""
    return b"abcdefghij klmnopqrs tuvwxyz"[zlib.crc32(repr((prompt_ids, seed, index)).encode()) % 28]


def expected_text(prompt: str | list[int], num_tokens: int, *, seed: int = 0, bos: bool = True) -> str:
    """What the fake model answers."""
    ids = prompt if isinstance(prompt, list) else ByteTokenizer().encode(prompt, add_special_tokens=bos)
    return bytes(draw_token(ids, seed, i) for i in range(num_tokens)).decode()


def fake_result(ids: list[int], width: int) -> list[float]:
    """What the fake model makes of a text that is read."""
    return [zlib.crc32(repr((ids, place)).encode()) / 2**32 - 0.5 for place in range(width)]


def token_logprobs(token_id: int, num_top: int, named: list[int] | None = None) -> TokenLogprobs:
    """Made-up logprobs; the first candidate is the token, one is impossible. That of token n is -n where it is
    named."""
    top = [(token_id, -0.5), (BOS, float("-inf")), *((200 + i, -1.0 - i) for i in range(50))]
    top = [(i, -float(i)) for i in range(VOCAB)] if num_top == -1 else top[:num_top]
    named_logprobs = [-float(i) for i in dict.fromkeys(named or ())]
    return TokenLogprobs(token_id, -0.5, 1, [t for t, _ in top], [p for _, p in top], named_logprobs)


class FakeAssembler:
    """Text of several choices with stop strings, in the plainest way."""

    def __init__(self, requests: list[EngineRequest], params: SamplingParams):
        self._index = {r.request_id: i for i, r in enumerate(requests)}
        self._ids: dict[int, list[int]] = {i: [] for i in range(len(requests))}
        self._sent = dict.fromkeys(self._ids, 0)
        self._done: set[int] = set()
        self._aborts: list[Abort] = []
        self._params = params
        self._hold = max((len(s) - 1 for s in params.stop_strings()), default=0)

    @property
    def is_finished(self) -> bool:
        return len(self._done) == len(self._ids)

    def to_abort(self) -> list[Abort]:
        aborts, self._aborts = self._aborts, []
        return aborts

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        index = self._index[output.request_id]
        if index in self._done:
            return None
        self._ids[index] += output.token_ids
        delta = ChoiceDelta(
            index, "", output.token_ids, output.logprobs, queued_s=output.queued_s,
            num_cached_tokens=output.num_cached_tokens, prompt_logprobs=output.prompt_logprobs,
            num_draft_tokens=output.num_draft_tokens, num_accepted_tokens=output.num_accepted_tokens
        )
        text = bytes(i for i in self._ids[index] if i < 256).decode(errors="ignore")
        end = len(text) - self._hold
        for stop in self._params.stop_strings():
            if stop in text:
                end = text.index(stop) + len(stop) * self._params.include_stop_str_in_output
                delta.finish_reason, delta.stop_reason = "stop", stop
                delta.matched_stop = stop
                self._aborts.append(Abort(output.request_id, "stop"))
        if output.finish is not None and delta.finish_reason is None:
            delta.finish_reason, delta.stop_reason, delta.error = (
                output.finish.reason, output.finish.stop_id, output.finish.error
            )
            delta.matched_stop = delta.stop_reason
            end = len(text)
        if delta.finish_reason is not None:
            self._done.add(index)
        delta.text, self._sent[index] = text[self._sent[index] : max(end, 0)], max(end, self._sent[index])
        return delta


@dataclass
class FakeClient:
    """The interface of `EngineClient`. A prompt with ``FULL`` is refused by the engine, and so are schemas with
    ``uniqueItems``, while a grammar with ``broken`` does not compile; one with ``BREAK3`` fails after three tokens, one
    with ``HOLD`` yields nothing until aborted.
    ``delay_s`` passes before each token. ``script`` is what the model answers, to everything, instead of sampled
    letters. ``drafts`` tokens more come in each step after the first token, as far as the answer goes, of half as many
    again that were verified."""

    delay_s: float = 0.0
    state: str = "ready"
    tokenizer: ByteTokenizer | None = field(default_factory=ByteTokenizer)
    config: EngineConfig = field(default_factory=EngineConfig)
    progress: tuple[str, float] = ("loading weights", 0.5)
    aborted: list[str] = field(default_factory=list)
    submitted: list[tuple[str, SamplingParams, str, int]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    origins: list[tuple[str, ...]] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    last_stats: EngineStats = field(default_factory=EngineStats)
    default_sampling: dict[str, float] = field(default_factory=dict)
    is_flushable: bool = True
    max_len: int = MAX_LEN
    pooling: PoolingFacts | None = None
    takes_media: MediaFacts | None = None
    media: list[list[MediaItem]] = field(default_factory=list)
    num_tokens: int = 0
    script: bytes = b""
    drafts: int = 0
    prompts: list[str | list[int]] = field(default_factory=list)
    tasks: set[asyncio.Task] = field(default_factory=set)
    children: dict[str, asyncio.Event] = field(default_factory=dict)
    replicas: tuple[()] = ()
    controls: list[object] = field(default_factory=list)
    refusal: HeadraceError | None = None
    released: set[str] = field(default_factory=set)
    engine_pids: tuple[int | None, ...] = (1,)

    def __post_init__(self) -> None:
        self._is_held = False
        self.memory = [MemoryLine("weights", 2**20), MemoryLine("KV cache", 2**21, "8192 tokens")]
        self.facts = ModelFacts(
            model="fake-model", architecture="FakeForCausalLM", family="fake", dtype="float32", device="cpu",
            max_model_len=self.max_len, vocab_size=VOCAB, eos_ids=[EOS], num_parameters=1000, page_size=16,
            num_kv_tokens=8192, default_sampling=self.default_sampling, pooling=self.pooling, media=self.takes_media
        )

    def shrink(self, max_len: int) -> None:
        """Serve a context of so many tokens from now on."""
        self.max_len, self.facts = max_len, msgspec.structs.replace(self.facts, max_model_len=max_len)

    @property
    def is_held(self) -> bool:
        return self._is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._is_held = is_held
        if self.state in ("ready", "asleep"):
            self.state = "asleep" if is_held or self.released & VITAL_PARTS else "ready"

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [ReplicaStatus(0, self.state, self.last_stats, facts=self.facts)]

    @property
    def num_inflight(self) -> int:
        return len({name.partition("/")[0] for name in self.children})

    def submit(
        self, prompt, params, *, request_id=None, namespace="", priority=0, deadline_s=None, add_special_tokens=True,
        tags=NO_TAGS,
    ) -> RequestStream:
        self.origins.append(tags.origin)
        self.adapters.append(tags.adapter)
        if self.state != "ready":
            raise EngineUnavailable(f"the engine is {self.state}", retry_after=3)
        if isinstance(prompt, MediaPrompt):
            check_media(prompt.items, prompt.token_ids, self.facts.media)
            self.media.append(prompt.items)
            prompt = prompt.token_ids
        if isinstance(params, PoolingSpec):
            self.prompts.append(prompt)
            return self._read(prompt, params, request_id, namespace, priority)
        refuse_generation(self.facts)
        params.validate()
        ids = (
            self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str)
            else list(prompt)
        )
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        if any(i >= VOCAB for i in ids):
            raise RequestError(f"prompt holds an id that is not in the vocabulary of {VOCAB}", param="prompt")
        limit = self.max_len - len(ids)
        if limit < 1:
            raise ContextLengthExceeded(f"at most {self.max_len} tokens fit", param="prompt")
        if (params.max_tokens or 0) > limit and not params.fits_context:
            raise ContextLengthExceeded(
                f"at most {self.max_len} tokens fit; the prompt has {len(ids)} and max_tokens is {params.max_tokens}",
                param="max_tokens"
            )
        for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
            check_ids(getattr(params, name) or (), name, VOCAB)
        self.submitted.append((request_id, params, namespace, priority))
        self.deadlines.append(deadline_s)
        self.prompts.append(prompt)
        names = [request_id] if params.n == 1 else [f"{request_id}/{i}" for i in range(params.n)]
        num_out = min(params.max_tokens or limit, limit)
        requests = [EngineRequest(name, ids, SamplingSpec(), StopSpec(num_out)) for name in names]
        stream = RequestStream(request_id, requests, FakeAssembler(requests, params), self._abort)
        for index, request in enumerate(requests):
            self.children[request.request_id] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(
                self._run(stream, request, params, (params.seed or 0) + index)
            )
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return stream

    def _read(self, ids: list[int], spec: PoolingSpec, request_id: str, namespace: str, priority: int) -> RequestStream:
        """The result is there at once: a fixed function of the ids, as wide as the facts say. A text with ``ABORT`` is
        aborted before it."""
        (request,), assembler = open_request(request_id, ids, spec, facts=self.facts, tokenizer=None)
        self.submitted.append((request_id, request.pooling, namespace, priority))
        stream = RequestStream(request_id, [request], assembler, self._abort)
        if b"ABORT" in bytes(i for i in ids if i < 256):
            stream.feed(RequestOutput(request_id, [], Finish("abort")))
            return stream
        stream.feed(
            RequestOutput(
                request_id, [], Finish("stop"),
                pooled=pack_floats(fake_result(ids, len(spec.label_ids) or self.facts.pooling.width))
            )
        )
        return stream

    def _abort(self, aborts) -> None:
        for abort in aborts:
            self.aborted.append(abort.request_id)
            if abort.request_id in self.children:
                self.children[abort.request_id].set()

    async def _run(self, stream: RequestStream, request: EngineRequest, params: SamplingParams, seed: int) -> None:
        prompt = request.prompt_token_ids.tolist()
        text = bytes(i for i in prompt if i < 256).decode(errors="replace")
        ended = self.children[request.request_id]
        if "HOLD" in text:
            await ended.wait()
        broken = re.search(r"BREAK(\d+)", text)
        facts = {"num_cached_tokens": len(prompt) // 2, "queued_s": QUEUED_S}
        # the first choice, which computes all of the prompt
        if params.prompt_logprobs is not None and request.request_id in (stream.request_id, f"{stream.request_id}/0"):
            await asyncio.sleep(3 * self.delay_s)
            facts["prompt_logprobs"] = [
                None,
                *(
                    token_logprobs(i, params.prompt_logprobs, params.logprob_token_ids)
                    for i in prompt[1:]
                )
            ]
        finish = (
            Finish("error", error=ErrorInfo("queue_full", "the queue is full", None, 7)) if "FULL" in text else None
        )
        if params.grammar is not None and "uniqueItems" in params.grammar.text:
            kind = params.grammar.kind
            finish = Finish(
                "error",
                error=ErrorInfo("invalid_request_error", f"{kind}: the keyword 'uniqueItems' cannot be enforced", kind)
            )
        if params.grammar is not None and "broken" in params.grammar.text:
            error = ErrorInfo("invalid_request_error", "the grammar cannot be compiled: no rule 'broken'", "grammar")
            finish = Finish("error", error=error)
        tokens: list[int] = []
        new: list[int] = []  # made and not yet sent; what follows the first of them is accepted drafts
        while finish is None:
            await asyncio.sleep(self.delay_s)
            if ended.is_set():
                finish = Finish("abort")
            elif broken is not None and len(tokens) == int(broken[1]):
                finish = Finish("error", error=ErrorInfo("step_failed", "the step failed"))
            else:
                token = (
                    self.script[len(tokens)] if self.script else draw_token(prompt, seed, len(tokens))
                )
                tokens.append(token)
                self.num_tokens += 1
                finish = (
                    Finish("length") if len(tokens) == request.stop.max_tokens else Finish("stop")
                    if tokens == list(self.script) else None
                )
                num_top = params.logprobs_or_named
                logprobs = None if num_top is None else [token_logprobs(token, num_top, params.logprob_token_ids)]
                new.append(token)
                if finish is None and len(tokens) > 1 and len(new) <= self.drafts:
                    continue
                accepted, verified = len(new) - 1, self.drafts + self.drafts // 2 if len(tokens) > 1 else 0
                stream.feed(
                    RequestOutput(
                        request.request_id, new, finish, logprobs=logprobs, num_draft_tokens=verified,
                        num_accepted_tokens=accepted, **facts
                    )
                )
                facts, new = {}, []
                if finish is not None:
                    break
        else:
            stream.feed(RequestOutput(request.request_id, [], finish, **facts))
        del self.children[request.request_id]

    async def abort(self, request_id: str | None) -> None:
        self._abort(
            [Abort(name) for name in list(self.children) if request_id is None or name.partition("/")[0] == request_id]
        )

    async def stats(self) -> EngineStats:
        self.last_stats = EngineStats(
            num_running=len(self.children), num_pages=100, num_used_pages=40, num_evictable_pages=15,
            generation_tokens_total=self.num_tokens
        )
        return self.last_stats

    async def reset_prefix_cache(self) -> bool:
        return self.is_flushable

    async def control(self, method, *, timeout_s: float = 60.0):
        """Keeps what was asked; ``refusal`` is raised instead."""
        self.controls.append(method)
        if self.refusal is not None:
            raise self.refusal
        if isinstance(method, ReleaseMemory | AcquireMemory):
            self.released = (
                self.released | set(method.parts) if isinstance(method, ReleaseMemory)
                else self.released - set(method.parts)
            )
            self.is_held = self._is_held
            return sorted(self.released)
        if isinstance(method, LoadAdapter | UnloadAdapter):
            return msgspec.to_builtins(AdapterInfo(method.name, getattr(method, "path", ""), "d" * 64, 8, 2_000_000))
        if isinstance(method, ListAdapters):
            return [msgspec.to_builtins(AdapterInfo("sql", "sql", "d" * 64, 8, 2_000_000, modules=["q_proj"]))]
        return "a.trace.json" if isinstance(method, StopProfile) else None

    async def close(self, drain_s: float = 0.0) -> None:
        self.state = "stopped"

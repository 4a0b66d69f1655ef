"""A device made of dictionaries: runs plans, and proves at every step that what attention would read is really there.

KV is modelled by a fingerprint of the whole prefix up to a position, kept at (group, page, offset). A page used after
it was freed, a table entry never sent, a chunk computed twice or skipped: each shows as a wrong fingerprint.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headrace.base.cache import NULL_PAGE, CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import CacheConfig, SchedulerConfig
from headrace.base.grammar import Grammar
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import Arrival, PageMove, PromptLogprobs, RowDraft, StepPlan, StepResult, TokenLogprobs
from headrace.scheduling.scheduler import Features, Scheduler

MODULUS = 2**61 - 1


def extend_print(fingerprint: int, token: int) -> int:
    """The fingerprint of a prefix and one token more."""
    return (fingerprint * 1_000_003 + token + 17) % MODULUS


def draw_token(fingerprint: int, seed: int, vocab: int) -> int:
    """What the fake model says after a prefix: depends on every token of it and on the request's seed."""
    return (fingerprint * 2_654_435_761 + seed * 40_503 + 11) % MODULUS % vocab


FORCED = Grammar("regex", "forced")
"""The fake device guesses what the outputs of requests with this grammar continue with, rightly or not."""


def run_alone(ask: EngineRequest, vocab: int, max_model_len: int) -> tuple[list[int], str]:
    """Output and finish reason of a request that runs with nothing else in the world: the oracle."""
    fingerprint = start_print(ask.namespace)
    for token in ask.prompt_token_ids:
        fingerprint = extend_print(fingerprint, token)
    output: list[int] = []
    stops = {*ask.stop.eos_ids, *ask.stop.stop_ids}
    limit = min(ask.stop.max_tokens, max_model_len - len(ask.prompt_token_ids))
    while len(output) < limit:
        token = draw_token(fingerprint, ask.sampling.seed, vocab)
        output.append(token)
        if token in stops and len(output) >= ask.stop.min_tokens:
            return output, "stop"
        fingerprint = extend_print(fingerprint, token)
    return output, "length"


def pooled_bytes(fingerprint: int) -> bytes:
    """What the fake model makes of a whole text."""
    return (fingerprint % 2**32).to_bytes(4, "little")


def start_print(namespace: str) -> int:
    return sum(ord(c) * 7919 for c in namespace) + 1


@dataclass
class Row:
    """One row of the device-side request state."""

    request_id: str
    prints: list[int]  # fingerprint after each known token
    seed: int
    prompt_len: int
    wants_prompt_logprobs: bool
    is_pooled: bool = False
    is_forced: bool = False
    tables: list[dict[int, int]] = field(default_factory=list)
    computed_len: int = 0
    last_token: int = -1
    host_len: int = 0  # tokens that spans other than decodes can read


class FakeTiers:
    """Host memory, and copies that take their time, fail in part, and leave garbage until they end. ``kv[g]`` is the
    device's; ``host[g]`` has the fingerprints of a host page by offset. Storage has the pages of ``damaged`` too, but
    cannot read them."""

    def __init__(self, kv: list[dict[tuple[int, int], int]], random_: random.Random):
        self.kv, self.random = kv, random_
        self.host: list[dict[int, dict[int, int]]] = [{} for _ in kv]
        self.storage: list[dict[bytes, dict[int, int]]] = [{} for _ in kv]
        self.moving: dict[int, tuple[PageMove, list[dict[int, int]]]] = {}
        self.damaged: set[bytes] = set()
        self.failure_rate = self.delay_rate = 0.0
        self.num_read = self.num_fetched = 0

    def page(self, group: int, page: int) -> dict[int, int]:
        return {offset: print_ for (own, offset), print_ in self.kv[group].items() if own == page}

    def start(self, moves: list[PageMove]) -> None:
        for move in moves:
            assert move.ticket not in self.moving and move.num_pages > 0
            snapshot = []
            if "storage" in (move.source, move.target):
                assert len(move.source_pages) + len(move.target_pages) in (0, len(move.keys))
                for page in move.target_pages:
                    self.host[move.group][page] = {0: -1}
                self.moving[move.ticket] = move, snapshot
                continue
            assert len(move.source_pages) == len(move.target_pages)
            if (move.source, move.target) == ("device", "host"):
                snapshot = [self.page(move.group, page) for page in move.source_pages]
                for page in move.target_pages:
                    self.host[move.group][page] = {0: -1}
            else:
                assert (move.source, move.target) == ("host", "device")
                self._spoil(move.group, move.target_pages)
            self.moving[move.ticket] = move, snapshot

    def _spoil(self, group: int, pages: list[int]) -> None:
        for page in pages:
            for offset in self.page(group, page):
                self.kv[group][page, offset] = -2

    def land(self) -> list[Arrival]:
        """End some moves, in any order."""
        tickets = [ticket for ticket in self.moving if self.random.random() >= self.delay_rate]
        self.random.shuffle(tickets)
        return [self._end(*self.moving.pop(ticket)) for ticket in tickets]

    def _end(self, move: PageMove, snapshot: list[dict[int, int]]) -> Arrival:
        failed = [i for i in range(move.num_pages) if self.random.random() < self.failure_rate]
        if "storage" in (move.source, move.target):
            return self._end_storing(move, set(failed))
        for index, (source, target) in enumerate(zip(move.source_pages, move.target_pages, strict=True)):
            if index in failed:
                continue
            if snapshot:
                self.host[move.group][target] = snapshot[index]
                continue
            self.num_read += 1
            self._spoil(move.group, [target])
            for offset, print_ in self.host[move.group][source].items():
                self.kv[move.group][target, offset] = print_
        return Arrival(move.ticket, failed)

    def _end_storing(self, move: PageMove, failed: set[int]) -> Arrival:
        storage, host = self.storage[move.group], self.host[move.group]
        for index, key in enumerate(move.keys):
            if move.target == "storage" and index not in failed:
                storage[key] = host[move.source_pages[index]]
            elif (move.source == "storage" and key not in storage) or (move.target == "host" and key in self.damaged):
                failed.add(index)
            elif move.target == "host" and index not in failed:
                self.num_fetched += 1
                host[move.target_pages[index]] = storage[key]
        return Arrival(move.ticket, sorted(failed))


class FakeRunner:
    """Executes at launch, as a device in plan order would; results are picked up later."""

    def __init__(self, layout: CacheLayout, vocab: int):
        self.layout = layout
        self.vocab = vocab
        self.rows: dict[int, Row] = {}
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in layout.groups]
        self.namespaces: dict[str, str] = {}
        self.num_computed = 0
        self.num_accepted = 0
        self.last_step = -1
        self.random = random.Random(vocab)
        self.rate = 0.8  # of drafts that are right
        self.tiers = FakeTiers(self.kv, self.random)

    def idles(self, plan: StepPlan) -> bool:
        """Whether the plan does nothing."""
        return not plan.rows and not self.tiers.moving

    def execute(self, plan: StepPlan, failed: set[str] = frozenset()) -> StepResult:
        """Apply the plan in the documented order, check every read, and draw tokens."""
        assert plan.step_id == self.last_step + 1
        self.last_step = plan.step_id
        self.tiers.start(plan.moves)
        self._apply_changes(plan)
        assert len(set(plan.rows)) == len(plan.rows) == len(plan.begins) == len(plan.lengths) == len(plan.samples)
        assert not self.idles(plan), "a plan that does nothing"
        written: set[tuple[int, int, int]] = set()
        drafts = {draft.row: draft for draft in plan.drafts}
        assert drafts.keys() <= set(plan.rows[: plan.num_decodes]), "drafts of a row that does not decode"
        tokens, counts, prompts, broken, pooled, guesses = [], [], [], [], [], []
        for index, (row_id, begin, length) in enumerate(zip(plan.rows, plan.begins, plan.lengths, strict=True)):
            row = self.rows[row_id]
            self.num_computed += length
            if index < plan.num_decodes:
                assert plan.samples[index] == length
                new_ids = self._verify(row, begin, self._find_drafts(row, length - 1, drafts.get(row_id)), written)
                tokens += new_ids
                counts.append(len(new_ids))
            else:
                assert begin + length <= row.host_len, "a span of tokens that nobody told the device"
                self._write(row, begin, row.prints[begin : begin + length], written)
                row.computed_len = begin + length
                if plan.samples[index]:
                    assert begin + length == len(row.prints), "sampled before the end of what is known"
                    tokens.append(self._sample(row))
                    counts.append(1)
            if row.wants_prompt_logprobs:
                entries = [
                    TokenLogprobs(p, -1.0, 1) for p in range(max(1, begin + 1), min(begin + length + 1, row.prompt_len))
                ]
                if entries:
                    prompts.append(PromptLogprobs(row_id, max(1, begin + 1), entries))
            if row.is_pooled and begin + length == len(row.prints):
                pooled.append((row_id, pooled_bytes(row.prints[-1])))
            if row.request_id in failed:
                broken.append((row_id, "logits are not finite"))
            if row.is_forced and plan.samples[index]:
                guesses += self._guess(row_id, row)
        has_drafts = max(counts, default=0) > 1 or any(length > 1 for length in plan.lengths[: plan.num_decodes])
        return StepResult(
            plan.step_id, tokens, None, prompts, broken, pooled, drafts=guesses, counts=counts if has_drafts else [],
            arrived=self.tiers.land(),
        )

    def _sample(self, row: Row) -> int:
        row.last_token = draw_token(row.prints[-1], row.seed, self.vocab)
        row.prints.append(extend_print(row.prints[-1], row.last_token))
        return row.last_token

    def _find_drafts(self, row: Row, count: int, guess: RowDraft | None) -> list[int]:
        """The next ``count`` tokens of a guess, -1 where it has none; without a guess the device makes some itself."""
        position = row.computed_len + 1
        if guess is None:
            return self._continue(row, count)
        at = position - guess.start
        if at < 0 or (at > 0 and (at > len(guess.token_ids) or guess.token_ids[at - 1] != row.last_token)):
            return [-1] * count
        found = guess.token_ids[at : at + count]
        return found + [-1] * (count - len(found))

    def _continue(self, row: Row, count: int) -> list[int]:
        """The true continuation of a row, wrong in places."""
        fingerprint, ids = row.prints[-1], []
        for _ in range(count):
            token = draw_token(fingerprint, row.seed, self.vocab)
            ids.append(token if self.random.random() < self.rate else -1 - self.random.randrange(self.vocab))
            fingerprint = extend_print(fingerprint, token)
        return ids

    def _verify(self, row: Row, begin: int, drafts: list[int], written: set[tuple[int, int, int]]) -> list[int]:
        """Compute a decode and its drafts; returns the tokens sampled up to the first wrong draft."""
        first = row.computed_len
        assert first == len(row.prints) - 1 <= begin, "a decode begins behind the bound of its plan"
        prints = [row.prints[-1]]
        for token in drafts:
            prints.append(extend_print(prints[-1], token))
        self._write(row, first, prints, written)
        new_ids = [self._sample(row)]
        for token in drafts:
            if token != new_ids[-1]:
                break
            self._check_reads(row, first + len(new_ids), 1)
            new_ids.append(self._sample(row))
        row.computed_len = first + len(new_ids)
        self.num_accepted += len(new_ids) - 1
        return new_ids

    def _guess(self, row_id: int, row: Row) -> list[RowDraft]:
        run = self._continue(row, self.random.choice((0, 0, 1, 3, 9)))
        return [RowDraft(row_id, len(row.prints), run)] if run else []

    def reset(self) -> None:
        """Forget all rows, as the executor does after a failed step."""
        self.rows.clear()
        self.tiers.moving.clear()

    def _apply_changes(self, plan: StepPlan) -> None:
        for row_id in plan.releases:
            del self.rows[row_id]
        for start in plan.starts:
            assert start.row not in self.rows and 0 <= start.row < self.layout.max_rows
            prints, fingerprint = [], start_print(self.namespaces.get(start.request_id, ""))
            for token in start.token_ids:
                fingerprint = extend_print(fingerprint, token)
                prints.append(fingerprint)
            wants = start.sampling.num_prompt_logprobs >= 0
            tables: list[dict[int, int]] = [{} for _ in self.layout.groups]
            is_pooled = start.pooling is not None
            is_forced = start.sampling.grammar is not None
            self.rows[start.row] = Row(
                start.request_id, prints, start.sampling.seed, start.prompt_len, wants, is_pooled, is_forced, tables,
                host_len=len(prints)
            )
        entries = [
            (append.group, append.row, entry)
            for append in plan.appends
            for entry in range(append.start, append.start + len(append.pages))
        ]
        assert len(set(entries)) == len(entries), "a page-table entry is written twice in one plan"
        for append in plan.appends:
            assert NULL_PAGE not in append.pages and max(append.pages) < self.layout.groups[append.group].num_pages
            self.rows[append.row].tables[append.group].update(enumerate(append.pages, append.start))

    def _slot(self, row: Row, group: int, position: int) -> tuple[int, int]:
        size = self.layout.page_size
        return row.tables[group][position // size], position % size

    def _write(self, row: Row, begin: int, prints: list[int], written: set[tuple[int, int, int]]) -> None:
        """Compute the positions from ``begin`` on, with these fingerprints; the first must find all before it."""
        for group in range(len(self.layout.groups)):
            for position, fingerprint in enumerate(prints, begin):
                page, offset = self._slot(row, group, position)
                assert (group, page, offset) not in written, "two rows write one slot"
                written.add((group, page, offset))
                self.kv[group][page, offset] = fingerprint
        known = len(row.prints) - begin  # of a verify step only the first position: the drafts may be wrong
        self._check_reads(row, begin, min(len(prints), known))

    def _check_reads(self, row: Row, begin: int, length: int) -> None:
        for group, spec in enumerate(g.spec for g in self.layout.groups):
            low = max(0, begin - spec.window + 1) if spec.window else 0
            for position in range(low, begin + length):
                slot = self._slot(row, group, position)
                assert self.kv[group].get(slot) == row.prints[position], (
                    f"{row.request_id}: position {position} is not in group {group}"
                )


class FakeEngine:
    """Scheduler and fake device, in the engine's loop; collects outputs and checks how they end."""

    def __init__(self, scheduler: Scheduler, layout: CacheLayout, *, vocab: int, num_stages: int = 1):
        self.scheduler, self.num_stages = scheduler, num_stages
        self.runner = FakeRunner(layout, vocab)
        self.layout, self.vocab, self.depth = layout, vocab, scheduler.depth
        self.flights: list[tuple[StepPlan, StepResult]] = []
        self.asks: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_positions: dict[str, list[int]] = {}
        self.finishes: dict[str, RequestOutput] = {}
        self.plans: list[StepPlan] = []
        self.num_accepted = 0  # drafts among all outputs

    def add(self, ask: EngineRequest) -> None:
        self.scheduler.add(ask)
        self.asks[ask.request_id] = ask
        self.tokens[ask.request_id] = []
        self.prompt_positions[ask.request_id] = []
        self.runner.namespaces[ask.request_id] = ask.namespace

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        assert len({output.request_id for output in outputs}) == len(outputs), "two outputs of one request in one batch"
        for output in outputs:
            assert output.request_id not in self.finishes, "output after the last"
            assert output.token_ids or output.finish or output.prompt_logprobs, "an output without content"
            assert len(output.token_ids) - output.num_accepted_tokens == bool(output.token_ids), "one token is no draft"
            assert 0 <= output.num_accepted_tokens <= output.num_draft_tokens
            self.num_accepted += output.num_accepted_tokens
            self.tokens[output.request_id] += output.token_ids
            self.prompt_positions[output.request_id] += [entry.token_id for entry in output.prompt_logprobs or []]
            if output.finish is not None:
                self.finishes[output.request_id] = output
        return outputs

    def abort(self, request_id: str, reason: str = "abort") -> RequestOutput | None:
        output = self.scheduler.abort(request_id, reason)
        if output is not None:
            self.take([output])
        return output

    def launch(self, failed: set[str] = frozenset()) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            if self.num_stages > 1:
                self._check_stages(plan)
            self.plans.append(plan)
            self.flights.append((plan, self.runner.execute(plan, failed)))
        return plan

    def _check_stages(self, plan: StepPlan) -> None:
        """The first stage can begin with the plan now: it needs no token that is still on its way."""
        decodes = plan.rows[: plan.num_decodes]
        assert len(self.flights) < self.num_stages and len(plan.last_tokens) == plan.num_decodes
        for row, begin, last in zip(decodes, plan.begins, plan.last_tokens, strict=False):
            known = self.runner.rows[row]
            assert (begin, last) == (known.computed_len, known.last_token), "the plan says where the row is"
            for flight, _ in self.flights:
                sampling = [r for r, count in zip(flight.rows, flight.samples, strict=True) if count]
                assert row not in sampling, "the row's last token is not known to the host yet"

    def land(self) -> list[RequestOutput]:
        plan, result = self.flights.pop(0)
        return self.take(self.scheduler.commit(plan, result))

    def crash(self, error: BaseException) -> list[RequestOutput]:
        """The oldest step in flight raises."""
        plan, _ = self.flights.pop(0)
        outputs = self.take(self.scheduler.fail(plan, error))
        self.runner.reset()
        return outputs

    def step(self) -> list[RequestOutput]:
        """Fill the pipeline, then land one step."""
        while len(self.flights) < self.depth and self.launch():
            pass
        return self.land() if self.flights else []

    def step_among_faults(self, rng: random.Random) -> None:
        """A step, behind an abort or a step that raises now and then; pages and rows are accounted for after it."""
        if self.asks and rng.random() < 0.05:
            self.abort(rng.choice(list(self.asks)))
        if self.flights and rng.random() < 0.01:
            self.crash(RuntimeError("boom"))
        self.step()
        self.scheduler.check()

    def drain(self, most: int = 20_000) -> None:
        """Run until nothing is left to do."""
        while self.scheduler.has_work:
            assert most > 0, "no end in sight"
            most -= 1
            num_plans, num_flights = len(self.plans), len(self.flights)
            self.step()
            assert num_flights or len(self.plans) > num_plans or not self.scheduler.has_work, "stuck"

    def check_outputs(self) -> None:
        """Every request ended, and as if it had run alone."""
        assert self.finishes.keys() == self.asks.keys()
        for request_id, ask in self.asks.items():
            want, reason = run_alone(ask, self.vocab, self.layout.max_model_len)
            finish = self.finishes[request_id].finish
            got = self.tokens[request_id]
            if finish.reason in ("abort", "error"):
                assert got == want[: len(got)]
            else:
                assert (got, finish.reason) == (want, reason)
                if ask.sampling.num_prompt_logprobs >= 0:
                    assert self.prompt_positions[request_id] == list(range(1, len(ask.prompt_token_ids)))


def make_layout(
    num_pages: int, *, page_size: int = 4, max_rows: int = 4, max_model_len: int = 64, window: int = 0,
    window_pages: int = 0, full: bool = True,
    soft_pages: int = 0, host_pages: int = 0, store_pages: int = 8, has_storage: bool = False,
) -> CacheLayout:
    """A full group, a window group when ``window`` is given, or the latter alone."""
    tiers = (host_pages, store_pages)
    groups = [CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], num_pages, soft_pages, *tiers)] if full else []
    if window:
        groups.append(
            CacheGroup(
                CacheSpec("sliding_window", 1, 8, 8, "float32", window=window), [1], window_pages or num_pages,
                soft_pages, *tiers
            )
        )
    return CacheLayout(page_size, max_rows, max_model_len, groups, has_storage)


def make_engine(
    layout: CacheLayout, *, vocab: int = 50, prefix_cache: bool = True, clock=lambda: 0.0, num_stages: int = 1,
    **options
) -> FakeEngine:
    """A fake engine over the layout; ``options`` are the scheduler's."""
    options = {"max_step_tokens": 16, "overlap_depth": 1, "max_running_requests": layout.max_rows} | options
    config = SchedulerConfig(**options)
    scheduler = Scheduler(
        config, CacheConfig(prefix_cache=prefix_cache), layout, clock=clock,
        features=Features(num_stages),
    )
    return FakeEngine(scheduler, layout, vocab=vocab, num_stages=num_stages)


def make_ask(
    request_id: str, prompt: list[int], max_tokens: int = 4, *, seed: int = 0, prompt_logprobs: int = -1, **fields
) -> EngineRequest:
    """A request; ``stop`` fields and message fields by keyword."""
    stop = {name: fields.pop(name) for name in ("min_tokens", "eos_ids", "stop_ids") if name in fields}
    sampling = SamplingSpec(seed=seed, num_prompt_logprobs=prompt_logprobs, grammar=fields.pop("grammar", None))
    return EngineRequest(request_id, prompt, sampling, StopSpec(max_tokens, **stop), **fields)

"""`Committer`: applies a step's result to its requests: appends tokens, finds stops, stores computed pages.

Ignores results for requests that have finished or were retracted since the step was planned (their epoch differs).
"""

from __future__ import annotations

from headrace.base.errors import RequestError, StepFailed
from headrace.base.messages import ErrorInfo, Finish, RequestOutput
from headrace.base.step import StepResult, TokenLogprobs
from headrace.base.transfer import FirstTokens
from headrace.scheduling.cache.prefix_tree import note_sound
from headrace.scheduling.drafting import Drafting
from headrace.scheduling.lifecycle import Lifecycle
from headrace.scheduling.planner import Flight
from headrace.scheduling.request import Counters, Request
from headrace.scheduling.sharing import SharedPrefills


class Committer:
    """Applies results in plan order."""

    def __init__(self, *, lifecycle: Lifecycle, sharing: SharedPrefills, drafting: Drafting, counters: Counters):
        self._lifecycle = lifecycle
        self._sharing = sharing
        self._drafting = drafting
        self._counters = counters

    def commit(self, flight: Flight, result: StepResult) -> list[RequestOutput]:
        """One output for every request that progressed."""
        # Failures first: they change epochs, so the commits below skip those rows' tokens.
        outputs = self._end_failed(flight, result) if result.failed_rows or result.refused_rows else []
        if result.counts:
            self._commit_verified(flight, result, outputs)
        else:
            self._commit_decodes(flight, result, outputs)
        self._commit_prefills(flight, result, outputs)
        if result.drafts:
            live = {request.row: request for request in flight.live_requests()}
            for draft in result.drafts:
                if draft.row in live:
                    self._drafting.guess(live[draft.row], draft.start, draft.token_ids)
        counters = self._counters
        counters.steps += bool(flight.requests)
        counters.computed_tokens += sum(flight.plan.lengths)
        return outputs

    def _end_failed(self, flight: Flight, result: StepResult) -> list[RequestOutput]:
        """End the requests of rows that failed or were refused. Their pages are not kept: the KV behind non-finite
        logits may be non-finite, too, and so may what earlier chunks have stored."""
        failed, refused, outputs = dict(result.failed_rows), dict(result.refused_rows), []
        for request in flight.live_requests():
            if request.row in refused:
                finish = Finish("error", error=ErrorInfo.of(RequestError(refused[request.row])))
                outputs.append(self._lifecycle.finish(request, finish, [], keep_pages=False))
            elif request.row in failed:
                finish = Finish("error", error=ErrorInfo.of(StepFailed(failed[request.row])))
                output = self._lifecycle.doubt(request, finish)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _commit_decodes(self, flight: Flight, result: StepResult, outputs: list[RequestOutput]) -> None:
        """The hot loop: every running request, every step without drafts. Decodes come first in a plan, so span i is
        token i."""
        num_decodes = flight.plan.num_decodes
        token_ids, logprobs, append = result.token_ids, result.logprobs, outputs.append
        num_generated = 0
        for request, epoch, token, index in zip(flight.requests, flight.epochs, token_ids, range(num_decodes)):  # noqa: B905
            if request.epoch != epoch:
                continue
            tokens = request.tokens
            tokens.append(token)
            request.computed_len += 1
            num_generated += 1
            entries = None if logprobs is None or (entry := logprobs[index]) is None else [entry]
            if token in request.stop_ids or len(tokens) >= request.max_len:
                finish = self._find_finish(request, token)
                if finish is not None:
                    append(self._lifecycle.finish(request, finish, [token], logprobs=entries))
                    continue
            append(RequestOutput(request.request_id, [token], None, request.num_cached_tokens, entries))
        self._counters.generation_tokens += num_generated

    def _commit_verified(self, flight: Flight, result: StepResult, outputs: list[RequestOutput]) -> None:
        """The same where some requests had drafts: each has as many tokens as its count says, at least one."""
        plan, end = flight.plan, 0
        counts = result.counts[: plan.num_decodes]
        for request, epoch, length, count in zip(flight.requests, flight.epochs, plan.lengths, counts):  # noqa: B905
            begin, end = end, end + count
            if request.epoch != epoch:
                continue
            request.planned_len -= length - count
            request.num_unsure -= length - 1
            if length > 1:
                self._drafting.note(request, length - 1, count - 1, flight.verified.get(request))
            new_ids, finish = result.token_ids[begin:end], None
            for index, token in enumerate(new_ids):
                request.tokens.append(token)
                request.computed_len += 1
                if token in request.stop_ids or request.known_len >= request.max_len:
                    finish = self._find_finish(request, token)
                    if finish is not None:
                        new_ids = new_ids[: index + 1]  # what follows was sampled behind the end
                        break
            self._counters.generation_tokens += len(new_ids)
            logprobs = None if result.logprobs is None else result.logprobs[begin : begin + len(new_ids)]
            entries = None if logprobs is None or logprobs[0] is None else [e for e in logprobs if e is not None]
            if finish is not None:
                last = self._lifecycle.finish(request, finish, new_ids, logprobs=entries, num_draft_tokens=length - 1)
                outputs.append(last)
            else:
                outputs.append(
                    RequestOutput(
                        request.request_id, new_ids, None, request.num_cached_tokens, entries,
                        num_draft_tokens=length - 1, num_accepted_tokens=count - 1
                    )
                )

    def _commit_prefills(self, flight: Flight, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Chunks of prompts: store their pages, and append what was sampled."""
        plan = flight.plan
        chunks, pooled = {chunk.row: chunk for chunk in result.prompt_logprobs}, dict(result.pooled)
        # index of the next sampled token
        sampled = sum(result.counts[: plan.num_decodes]) if result.counts else plan.num_decodes
        for index in range(plan.num_decodes, len(plan.rows)):
            request, token, entry = flight.requests[index], None, None
            if plan.samples[index]:
                token = result.token_ids[sampled]
                entry = None if result.logprobs is None else result.logprobs[sampled]
                sampled += 1
            if request.epoch != flight.epochs[index]:  # after ``sampled`` has advanced, or later rows would shift
                continue
            request.computed_len = plan.begins[index] + plan.lengths[index]
            # Stored now, not at the end: requests with the same prefix can use the pages from the next plan on. The
            # claim in ``sharing`` moves to the page behind those stored.
            self._lifecycle.note_chunk(request)
            self._sharing.update(request)
            prompt = None
            if request.row in chunks:
                chunk = chunks[request.row]
                prompt = self._take_prompt_logprobs(request, chunk.start, chunk.entries)
            if request.row in pooled:
                outputs.append(self._lifecycle.finish(request, Finish("stop"), [], pooled=pooled[request.row]))
            elif token is not None:
                outputs.append(self._append_first(request, token, None if entry is None else [entry], prompt))
            elif prompt:
                outputs.append(RequestOutput(request.request_id, [], None, request.num_cached_tokens, None, prompt))

    def take_first(self, request: Request, first: FirstTokens) -> RequestOutput:
        """Append tokens that another engine sampled for a request that has not run here."""
        request.tokens.extend(first.token_ids)
        self._counters.generation_tokens += len(first.token_ids)
        request.goal_len = request.known_len
        finish = self._find_finish(request, first.token_ids[-1])
        if finish is not None:
            return self._lifecycle.finish(request, finish, first.token_ids, logprobs=first.logprobs)
        return RequestOutput(
            request.request_id, first.token_ids, None, request.prompt_len, first.logprobs, queued_s=request.queued_s
        )

    def _append_first(
        self, request: Request, token: int, logprobs: list[TokenLogprobs] | None, prompt: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Append the token sampled at the end of a prefill, the first since admission."""
        if request.max_output_len == 0:  # only the prompt's logprobs were wanted
            return self._lifecycle.finish(request, Finish("length"), [], prompt_logprobs=prompt)
        request.tokens.append(token)
        self._counters.generation_tokens += 1
        note_sound(request.holding.node)
        self._lifecycle.note_admission(request)
        finish = self._find_finish(request, token)
        if finish is not None:
            return self._lifecycle.finish(request, finish, [token], logprobs=logprobs, prompt_logprobs=prompt)
        return RequestOutput(
            request.request_id, [token], None, request.num_cached_tokens, logprobs, prompt, queued_s=request.queued_s
        )

    @staticmethod
    def _find_finish(request: Request, token: int) -> Finish | None:
        """Whether the token just appended ends the request; a stop id counts before the length does."""
        if token in request.stop_ids and request.output_len >= request.min_tokens:
            return Finish("stop", stop_id=token)
        if request.known_len >= request.max_len:
            return Finish("length")
        return None

    @staticmethod
    def _take_prompt_logprobs(request: Request, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
        """The part of a chunk that was not reported yet: after a retraction the prompt is computed again."""
        # Positions up to prompt_logprobs_len were reported before a retraction.
        fresh = entries[max(0, request.prompt_logprobs_len - start) :]
        request.prompt_logprobs_len = max(request.prompt_logprobs_len, start + len(entries))
        return fresh or None

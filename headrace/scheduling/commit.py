"""`Committer`: applies a step's result to its requests: appends tokens, finds stops, stores computed pages.

Ignores results for requests that have finished or were retracted since the step was planned (their epoch differs).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.base.errors import HeadraceError, RequestError, StepFailed
from headrace.base.messages import ErrorInfo, Finish, RequestOutput
from headrace.base.step import StepResult, TokenLogprobs
from headrace.scheduling.lifecycle import Lifecycle
from headrace.scheduling.planner import Flight
from headrace.scheduling.request import Counters, Request
from headrace.scheduling.running import RunningSet
from headrace.scheduling.sharing import SharedPrefills


class Committer:
    """Applies results in plan order."""

    def __init__(self, *, lifecycle: Lifecycle, running: RunningSet, sharing: SharedPrefills, counters: Counters):
        self._lifecycle = lifecycle
        self._running = running
        self._sharing = sharing
        self._counters = counters

    def commit(self, flight: Flight, result: StepResult, later: Iterable[Flight]) -> list[RequestOutput]:
        """One output for every request that progressed. ``later`` are the steps in flight behind this one."""
        # Failures first: they change epochs, so the commits below skip those rows' tokens.
        outputs = self._end_failed(flight, result) if result.failed_rows or result.refused_rows else []
        self._commit_decodes(flight, result, outputs)
        self._commit_prefills(flight, result, outputs)
        # Spans whose sample a forced token replaced: see `Flight.void_sample`.
        for request, epoch, end in flight.computed:
            if request.epoch == epoch:
                request.computed_len = end
        # Last: forced tokens extend the outputs made above.
        if result.forced:
            self._commit_forced(flight, result, later, outputs)
        counters = self._counters
        counters.steps += 1
        counters.computed_tokens += sum(flight.plan.lengths)
        return outputs

    def _end_failed(self, flight: Flight, result: StepResult) -> list[RequestOutput]:
        """End the requests of rows that failed or were refused. Their pages are not kept: the KV behind non-finite
        logits may be non-finite, too."""
        errors: dict[int, HeadraceError] = {row: StepFailed(message) for row, message in result.failed_rows}
        errors |= {row: RequestError(message) for row, message in result.refused_rows}
        outputs = []
        for request in flight.live_requests():
            if request.row in errors:
                error = ErrorInfo.of(errors[request.row])
                outputs.append(self._lifecycle.finish(request, Finish("error", error=error), [], keep_pages=False))
        return outputs

    def _commit_decodes(self, flight: Flight, result: StepResult, outputs: list[RequestOutput]) -> None:
        """The hot loop: every running request, every step. Decodes come first in a plan, so span i is token i."""
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

    def _commit_prefills(self, flight: Flight, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Chunks of prompts (or of tokens that a grammar forced): store their pages, and append what was sampled."""
        plan = flight.plan
        chunks, pooled = {chunk.row: chunk for chunk in result.prompt_logprobs}, dict(result.pooled)
        sampled = plan.num_decodes  # index of the next sampled token
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
            self._lifecycle.store_computed(request)
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

    def _append_first(
        self, request: Request, token: int, logprobs: list[TokenLogprobs] | None, prompt: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Append the token sampled at the end of a prefill, the first since admission."""
        if request.max_output_len == 0:  # only the prompt's logprobs were wanted
            return self._lifecycle.finish(request, Finish("length"), [], prompt_logprobs=prompt)
        request.tokens.append(token)
        self._counters.generation_tokens += 1
        self._lifecycle.note_admission(request)
        finish = self._find_finish(request, token)
        if finish is not None:
            return self._lifecycle.finish(request, finish, [token], logprobs=logprobs, prompt_logprobs=prompt)
        return RequestOutput(
            request.request_id, [token], None, request.num_cached_tokens, logprobs, prompt, queued_s=request.queued_s
        )

    def _commit_forced(
        self, flight: Flight, result: StepResult, later: Iterable[Flight], outputs: list[RequestOutput]
    ) -> None:
        """Append tokens that a grammar forced, behind those just sampled. They have no KV yet: their requests go back
        to prefilling, and what later steps in flight sample in their places is void."""
        live = {request.row: request for request in flight.live_requests()}
        positions = {output.request_id: position for position, output in enumerate(outputs)}
        for row, token_ids in result.forced:
            if row in live:
                position = positions[live[row].request_id]
                outputs[position] = self._extend(live[row], token_ids, later, outputs[position])

    def _extend(
        self, request: Request, token_ids: list[int], later: Iterable[Flight], output: RequestOutput
    ) -> RequestOutput:
        # A live row with forced tokens sampled in this step, so it has an output already.
        finish, new_ids = None, list(output.token_ids)
        for token in token_ids:
            request.tokens.append(token)
            new_ids.append(token)
            finish = self._find_finish(request, token)
            if finish is not None:
                break
        self._counters.generation_tokens += len(new_ids) - len(output.token_ids)
        if finish is not None:
            return self._lifecycle.finish(request, finish, new_ids, prompt_logprobs=output.prompt_logprobs)
        for flight in later:
            flight.void_sample(request)
        self._running.restart_prefill(request)
        return msgspec.structs.replace(output, token_ids=new_ids)

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

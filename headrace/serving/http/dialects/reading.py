"""`AnswerReader`: the events of one choice for dialects whose answers are made of items, whole or in pieces."""

from __future__ import annotations

from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import Event, TextDelta, merge_events
from headrace.serving.http.answering import AnswerPlan


class AnswerReader:
    """Reads one choice. Events come in the order the model wrote them; reasoning nobody asked for is left out."""

    def __init__(self, plan: AnswerPlan):
        self._parser = plan.parser() if plan.parses else None
        self._tells_reasoning = plan.tells_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether there is a complete call so far."""
        return self._parser is not None and self._parser.num_calls > 0

    def read(self, delta: ChoiceDelta | CompletionOutput) -> list[Event]:
        """The events of a delta, or of a whole output."""
        if self._parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        kept = [e for e in events if self._tells_reasoning or not (isinstance(e, TextDelta) and e.is_reasoning)]
        return merge_events(kept)

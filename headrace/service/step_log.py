"""`StepLog`: a step hook that tells the log, at level debug, what is planned and what becomes of requests."""

from __future__ import annotations

import logging

from headrace.base.config import EngineConfig
from headrace.base.hooks import RequestNews
from headrace.base.step import StepPlan

logger = logging.getLogger(__name__)


class StepLog:
    """See `StepHook`."""

    def __init__(self, config: EngineConfig):
        pass

    def step_planned(self, plan: StepPlan) -> None:
        """Sizes, and pages given out."""
        num_pages = sum(len(append.pages) for append in plan.appends)
        chunks = plan.lengths[plan.num_decodes :]
        logger.debug(
            "step %d: %d decodes, %d chunks of %d tokens, %d pages given out", plan.step_id, plan.num_decodes,
            len(chunks), sum(chunks), num_pages
        )

    def request_admitted(self, news: RequestNews) -> None:
        """Its prompt is computed."""
        logger.debug("request %s: prompt of %d tokens computed, in row %d", news.request_id, news.prompt_len, news.row)

    def request_retracted(self, news: RequestNews) -> None:
        """It lost its pages."""
        logger.debug("request %s: back to the queue with %d computed tokens", news.request_id, news.computed_len)

    def request_finished(self, news: RequestNews, reason: str) -> None:
        """It has ended."""
        logger.debug("request %s: ended (%s) after %d tokens", news.request_id, reason, news.output_len)

"""`CacheAwareRouter`: Headrace's balancing policies in Ray Serve's request router. Imported by Ray Serve in the process
of the gateway."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headrace.service.balancing import Policy, ReplicaState, RoutedRequest, create_policy
from headrace.serving.router.prompt_view import BYTES_PER_TOKEN, pack_hint

OUTPUT_TOKENS = 256
"""Load of a request beyond its prompt: what it will generate is not known."""


class CacheAwareRouter(RequestRouter):  # type: ignore[misc]
    """Offers the engine that the policy chooses, then the others by load. Loads are those of the requests that this
    gateway has sent."""

    _policy: Policy

    def initialize_state(self, policy: str = "cache-aware") -> None:
        """Called by Ray Serve instead of a constructor."""
        self._policy = create_policy(policy)
        self._indices: dict[ReplicaID, int] = {}  # a number is never used again
        self._num_indices = 0
        self._running: dict[ReplicaID, dict[str, int]] = {}  # tokens by request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`."""
        if len(candidate_replicas) < 2 or pending_request is None:
            return [candidate_replicas]
        by_index = {self._index_of(replica.replica_id): replica for replica in candidate_replicas}
        states = [
            ReplicaState(index, prefill_tokens=self._load_of(replica.replica_id))
            for index, replica in sorted(by_index.items())
        ]
        choice = self._policy.choose(RoutedRequest(pack_hint(_hint_of(pending_request))), states)
        others = sorted((state for state in states if state.index != choice.replica), key=lambda state: state.load)
        return [[by_index[choice.replica]], *([by_index[state.index]] for state in others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter`."""
        tokens = len(_hint_of(pending_request)) // BYTES_PER_TOKEN + OUTPUT_TOKENS
        self._running.setdefault(replica_id, {})[pending_request.metadata.internal_request_id] = tokens

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._running.get(replica_id, {}).pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`; forgets what is gone."""
        super().update_replicas(replicas)
        living = {replica.replica_id for replica in replicas}
        for replica_id in self._indices.keys() - living:
            self._policy.forget(self._indices.pop(replica_id))
        for replica_id in self._running.keys() - living:
            del self._running[replica_id]

    def _index_of(self, replica_id: ReplicaID) -> int:
        if replica_id not in self._indices:
            self._indices[replica_id] = self._num_indices
            self._num_indices += 1
        return self._indices[replica_id]

    def _load_of(self, replica_id: ReplicaID) -> int:
        return sum(self._running.get(replica_id, {}).values())


def _hint_of(pending_request: PendingRequest) -> bytes:
    hint = pending_request.args[1] if len(pending_request.args) > 1 else b""
    return hint if isinstance(hint, bytes) else b""

"""A lease is on its node's books while it is live, and runs out unless it is renewed."""

from __future__ import annotations

from collections.abc import Callable

from polar.server.alarms import Alarms
from polar.server.fleet import Fleet
from polar.server.state import Attempt, AttemptState, Node, Session, Task


class Leases:
    def __init__(self, fleet: Fleet, seconds: float, save: Callable[[Attempt], None]) -> None:
        self.seconds = seconds
        self._fleet = fleet
        self._save = save
        self._expiries: Alarms[Attempt] = Alarms()

    def begin(self, session: Session, node: Node, task: Task, now: float) -> Attempt:
        """The session's next attempt."""
        attempt = Attempt(
            session_id=session.session_id,
            number=len(session.attempts) + 1,
            node_id=node.node_id,
            epoch=node.epoch,
            leased_at=now,
            expires_at=now + self.seconds,
        )
        session.attempts.append(attempt)
        session.node_id = node.node_id
        assert node.asking is not None
        node.asking.init -= 1
        node.asking.run -= 1
        self.adopt(attempt, task)
        self._save(attempt)
        return attempt

    def adopt(self, attempt: Attempt, task: Task) -> None:
        """A live one goes on."""
        self._fleet.reserve(attempt, task)
        self._expiries.set(attempt.expires_at, attempt)

    def move(self, attempt: Attempt, task: Task, state: AttemptState) -> Node | None:
        """Every change of an attempt's state. Returns the node that has room again."""
        was_live, attempt.state = attempt.state is AttemptState.LEASED, state
        released = self._fleet.release(attempt, task) if was_live else None
        if state is AttemptState.LEASED:
            self.adopt(attempt, task)
        self._save(attempt)
        return released

    def renew(self, attempt: Attempt, now: float) -> None:
        attempt.expires_at, attempt.seen = now + self.seconds, True

    def renew_all(self, now: float) -> None:
        """The server was away."""
        for node in self._fleet.nodes.values():
            for attempt in node.leases.values():
                attempt.expires_at = now + self.seconds

    def expired(self, now: float) -> list[Attempt]:
        expired = []
        for attempt in self._expiries.due(now):
            if attempt.state is AttemptState.LEASED and attempt.expires_at <= now:
                expired.append(attempt)
            elif attempt.state is AttemptState.LEASED:
                self._expiries.set(attempt.expires_at, attempt)
        return expired

"""A callback is owed from its task's end until it was acknowledged or its deadline has passed."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from polar.server.alarms import Alarms
from polar.server.state import Delivery, DeliveryState, Task

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0


class Owed:
    """`due` are the callbacks to send now: the surroundings empty it, and say of each how it went."""

    def __init__(self, seconds: float, save: Callable[[Delivery], None]) -> None:
        self.seconds = seconds
        self.due: list[Delivery] = []
        self._save = save
        self._alarms: Alarms[Delivery] = Alarms()

    def owe(self, task: Task, now: float) -> None:
        """The id depends on task and URL alone, so that the receiver can tell a repeat."""
        if task.callback_url is None:
            return
        if task.delivery is not None and task.delivery.state is DeliveryState.PENDING:
            task.delivery.state = DeliveryState.EXPIRED
            self._save(task.delivery)
        task.delivery = Delivery(
            delivery_id=sha256(f"{task.task_id}\n{task.callback_url}".encode()).hexdigest()[:32],
            task_id=task.task_id,
            url=task.callback_url,
            due_at=now,
            deadline=now + self.seconds,
        )
        self._save(task.delivery)
        self._check(task.delivery, now)

    def adopt(self, delivery: Delivery) -> None:
        """Takes in a delivery as it was saved."""
        self._alarms.set(min(delivery.due_at, delivery.deadline), delivery)

    def delivered(self, delivery: Delivery) -> None:
        if delivery.state is DeliveryState.PENDING:
            delivery.sending, delivery.state, delivery.error = False, DeliveryState.DELIVERED, None
            self._save(delivery)

    def not_delivered(self, delivery: Delivery, why: str, now: float) -> None:
        if delivery.state is not DeliveryState.PENDING:
            return
        delivery.sending, delivery.error = False, why
        delivery.due_at = now + min(FIRST_WAIT * 2**delivery.tries, LONGEST_WAIT)
        delivery.tries = min(delivery.tries + 1, 62)
        self._save(delivery)
        self.adopt(delivery)

    def tick(self, now: float) -> None:
        for delivery in self._alarms.due(now):
            self._check(delivery, now)

    def _check(self, delivery: Delivery, now: float) -> None:
        if delivery.state is not DeliveryState.PENDING or delivery.sending:
            return
        if delivery.deadline <= now:
            delivery.state = DeliveryState.EXPIRED
            self._save(delivery)
        elif delivery.due_at <= now:
            delivery.sending = True
            self.due.append(delivery)

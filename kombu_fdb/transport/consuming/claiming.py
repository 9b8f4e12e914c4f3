"""How a fetcher claims: directly, or in a line with rivals; and the acks that go along.

A step of the fetcher asks it twice: :meth:`Claiming.stand`, before it looks at any queue, and :meth:`Claiming.claim`,
when it knows which are hungry. In between, :meth:`Claiming.others` are left alone: the first of their line
looks at them.

Room is promised once. A consumer that waits in a line may be granted all that it wants there at any moment. So before
it claims for the same channels from a queue that has no line (temporary, or with one active consumer), it leaves the
line (:meth:`Claiming.choose`). When it has joined the line again, and there is work, that queue leaves the room to the
line for :data:`LINE_FIRST_S` (:meth:`Claiming.deferred`), so that neither starves the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kombu_fdb.errors import Outrun
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.process.client import Client
from kombu_fdb.process.combiner_client import CombinerClient
from kombu_fdb.process.membership import Membership
from kombu_fdb.transport.consuming.dispatch import Dispatch, Plan
from kombu_fdb.transport.unacked import Room

#: How long a line that was left for another queue comes first, in seconds from joining it again.
LINE_FIRST_S = 0.25


class Claiming:
    """Of one fetcher, and called by its thread; :meth:`abandon` by any."""

    def __init__(self, client: Client, dispatch: Dispatch, combiner: CombinerClient) -> None:
        self.combiner = combiner
        self._client = client
        self._dispatch = dispatch
        #: Whether it has begun to stand in the line that there may be.
        self._began = False
        #: The line was left for another queue; and until when it comes first for that.
        self._owes_line = False
        self._line_first_until = 0.0

    @property
    def may_have_rivals(self) -> bool:
        """If not, it stands in no line. Asked at each turn."""
        return not self._began or self.combiner.rivalry.known or self.combiner.in_line

    def stand(self, membership: Membership, now: float, hand: list[Delivery]) -> Plan:
        """Join a line, look, or leave it, as rivals and room have it; what was granted comes into ``hand``.

        Returns the queues of a line whose first one it has just become. Raises as ``Membership.claim``.
        """
        self.combiner.belong_to(membership)
        if not self._began:
            self._begin()
        plan, combiner = self._contested(now), self.combiner
        queues = sorted(plan.queues)
        join = partial(combiner.join, membership, queues, plan.limit)
        if combiner.in_line and (list(combiner.queues) != queues or combiner.want > plan.limit):
            combiner.leave(hand)  # what it was granted there might not fit any more
        elif queues and not combiner.in_line:
            self._with_acks(membership, join)
            self._pay_line(queues, now)
        if hand or not combiner.attend(self._client.engine, hand):
            plan.queues = []
        if (
            queues and not hand and not combiner.in_line
        ):  # another consumer has evicted it, or ended it for its own good
            self._with_acks(membership, join)
        return plan

    def _pay_line(self, queues: list[str], now: float) -> None:
        if self._owes_line and self._client.engine.messages.has_work(queues):
            self._line_first_until = now + LINE_FIRST_S
        self._owes_line = False

    def deferred(self, plan: Plan, now: float) -> set[str]:
        """The queues that leave their room to the line; ``plan`` notes until when."""
        left_s = self._line_first_until - now
        if left_s <= 0 or not self.combiner.in_line:
            return set()
        plan.note(Room(0, left_s))
        return self._dispatch.competing(self.combiner.queues)

    def _begin(self) -> None:
        shared = self._dispatch.shared
        self._began = bool(shared)
        if shared and not self._client.engine.writers_take_turns:
            self.combiner.rivalry.suspect(shared)

    def _contested(self, now: float) -> Plan:
        shared = self._contested_queues()
        return self._dispatch.plan(shared, now) if shared else Plan()

    def others(self) -> set[str]:
        """The queues that another consumer looks at, or would if one had room."""
        return set() if self.combiner.is_first else self._contested_queues()

    def _contested_queues(self) -> set[str]:
        """Asked at each turn, so the queues are not gathered where there are no rivals."""
        if not self.combiner.rivalry.known:
            return set()
        shared = self._dispatch.shared
        return shared if self.combiner.rivalry.is_contested(shared) else set()

    def choose(self, plan: Plan, hand: list[Delivery]) -> None:
        """Keep of the plan what one transaction may do, and make room for it: a line, or what has none.

        What was granted in a line that was left for that comes into ``hand``; the plan is void then. Raises as
        ``Membership.claim``.
        """
        line = self.combiner.queues
        if not line:
            return
        of_line = plan.queues[0] in line  # it was first longest ago, so neither part shuts the other out
        plan.queues = [queue for queue in plan.queues if (queue in line) == of_line]
        if not (of_line or self._dispatch.competing(line).isdisjoint(plan.queues)):
            self._owes_line = True
            self.combiner.leave(hand)

    def claim(self, membership: Membership, plan: Plan, hand: list[Delivery]) -> None:
        """Carry a chosen plan out; what was found comes into ``hand``.

        Raises as ``Membership.claim``; the acks that it took along are pending again.
        """
        if self.combiner.in_line and not set(self.combiner.queues).isdisjoint(plan.queues):
            self.combiner.serve(plan.queues, plan.consumers, hand)
            return
        # Where writers take turns a claim gives way to none.
        shared = set() if self._client.engine.writers_take_turns else self._dispatch.shared
        claim = partial(
            membership.claim,
            plan.queues,
            plan.limit,
            no_ack=plan.leaseless,
            consumers=plan.consumers,
            gives_way=not shared.isdisjoint(plan.queues),
            hand=hand,
        )
        try:
            self._with_acks(membership, claim)
        except Outrun:
            self.combiner.rivalry.contest(shared)

    def _with_acks(self, membership: Membership, act: Callable[..., object]) -> None:
        acks: list[Lease] = []
        try:
            self._client.take_acks(acks)
            session_id = membership.session_id
            if others := [lease for lease in acks if lease.session != session_id]:  # of a session that was lost
                acks[:] = [lease for lease in acks if lease.session == membership.session_id]
                self._client.ack(others)
            act(acks=acks)
            self._client.settled(acks)  # the session stood, so did its leases
        except BaseException as error:
            self._client.give_acks_back(acks, error)
            raise

    def leave(self, hand: list[Delivery]) -> None:
        """Stand in no line, as the program does not drain. Raises as ``Membership.claim``."""
        self.combiner.leave(hand)

    def abandon(self) -> None:
        """Have the duties thread do the same. Never blocks; for finalizers, too."""
        self.combiner.abandon()

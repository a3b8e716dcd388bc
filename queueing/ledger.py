"""One number per session: device-seconds served over weight, the order of everything that is fair.

After "Fairness in Serving Large Language Models" (VTC, arXiv 2401.00588) with device-seconds for
tokens: a session that returns from idle is lifted to the level of the others, so nobody hoards
credit. It does not know requests, queues or devices.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

FLOOR = 0.05  # share of device-seconds that background gets while others wait
REMEMBERED = 10_000  # idle sessions whose debt is kept


@dataclass(slots=True)
class Account:
    """A session: its number, how many requests it has inside, how many of them run."""

    served: float = 0.0
    inside: int = 0
    running: int = 0
    entry: float = -1.0  # its value in the level heap; lower than served when stale


class Ledger:
    """Accounts of sessions that are inside, and the debts of some that have left."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._heap: list[
            tuple[float, str]
        ] = []  # (served when pushed, session), refreshed when read
        self._floor = 0.0  # level of the last leaver, for when nobody is inside

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, session: str) -> Account:
        """The account of a session that is inside."""
        return self._accounts[session]

    def served(self, session: str) -> float:
        """The session's number; the level for one that is not inside."""
        account = self._accounts.get(session)
        return self.level() if account is None else account.served

    def inside(self) -> int:
        """Requests that are inside, of all sessions."""
        return sum(account.inside for account in self._accounts.values())

    def running(self, session: str) -> int:
        account = self._accounts.get(session)
        return 0 if account is None else account.running

    def enter(self, session: str) -> Account:
        """A request of this session came in; returning from idle lifts it to the level of the
        others.
        """
        account = self._accounts.get(session)
        if account is None:
            account = Account(max(self.level(), self._debts.pop(session, 0.0)))
            self._accounts[session] = account
            self._push(session, account)
        account.inside += 1
        return account

    def leave(self, session: str) -> None:
        """A request of this session went out for good."""
        account = self._accounts[session]
        account.inside -= 1
        if account.inside == 0:
            del self._accounts[session]
            self._floor = max(self._floor, self.level() if self._accounts else account.served)
            if account.served > self._floor:
                self._remember(session, account.served)

    def charge(self, session: str, seconds: float) -> None:
        """Add weighted device-seconds; negative ones correct a prediction."""
        account = self._accounts.get(session)
        if account is None:
            return
        account.served += seconds
        if account.served < account.entry:
            self._push(session, account)

    def level(self) -> float:
        """The least number of those inside, to which newcomers are lifted."""
        while self._heap:
            value, session = self._heap[0]
            account = self._accounts.get(session)
            if account is not None and account.served == value:
                return max(value, 0.0)
            heapq.heappop(self._heap)
            if account is not None and value == account.entry:
                self._push(session, account)
        return self._floor

    def _push(self, session: str, account: Account) -> None:
        account.entry = account.served
        heapq.heappush(self._heap, (account.served, session))

    def _remember(self, session: str, served: float) -> None:
        self._debts[session] = served
        if len(self._debts) > REMEMBERED:
            self._debts.popitem(last=False)


@dataclass(slots=True)
class Floor:
    """The share of device-seconds that background is owed while others keep it waiting."""

    credit: float = 0.0  # seconds owed
    cost: float = 0.0  # seconds of the last background call

    def ran(self, seconds: float, background: bool, waits: bool) -> None:
        """Somebody was served; `waits` says whether background was kept waiting by it."""
        if background:
            self.credit, self.cost = max(self.credit - seconds, 0.0), seconds
        elif waits:
            self.credit += FLOOR * seconds

    @property
    def owed(self) -> bool:
        """Enough has come together for another call like the last."""
        return self.credit > 0 and self.credit >= self.cost

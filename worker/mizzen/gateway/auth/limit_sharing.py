# SPDX-License-Identifier: Apache-2.0
"""Shares the limits of API keys with the other gateway processes of the same service.

Each of N processes holds 1/N of every limit. A process that runs short asks the others for what they do not
use before it rejects a request. Amounts only move, so all processes together never exceed a limit, even if
some of them cannot reach each other. When a process joins or leaves, the others divide the limits again; one
that joins starts with empty buckets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from mizzen.gateway.auth.tenant import LimitKind, Tenant

log = logging.getLogger(__name__)

LOAN_PATH = "/admin/loan"
"""Path of the admin API at which a process answers a `LoanRequest`."""
ASK_SECONDS = 1.5
"""Maximum time that a request waits for the answers of other processes."""
EXHAUSTED_SECONDS = 0.2
"""Time without further questions after the other processes could not lend what a request needs."""
UNREACHABLE_SECONDS = 2.0
"""Time for which a process that did not answer is not asked."""
GIVE_BACK_SECONDS = 1.0
"""Interval at which borrowed slots of concurrent requests are given back if they are not needed."""
AHEAD_SECONDS = 0.5
"""A process borrows what the limit provides in this time in addition to what it needs, to ask less often."""


class LoanRequest(msgspec.Struct, frozen=True, rename="camel"):
    """Question of a gateway process to another one: may it have an unused amount of a key's limit?"""

    borrower: str
    """Name of the asking process."""
    key: str
    """Name of the API key."""
    kind: LimitKind
    amount: float
    """Amount that the process needs; 0 only reports `held`."""
    held: int = 0
    """Number of slots for concurrent requests that the process already has from the other one."""


class Loan(msgspec.Struct, frozen=True):
    """Answer to a `LoanRequest`."""

    granted: float
    """Amount that the asking process may use."""
    left: float = 0.0
    """Amount that the answering process keeps."""


class GatewayPeer(Protocol):
    """Another gateway process."""

    async def ask(self, request: LoanRequest) -> Loan:
        """Ask for an amount.

        Raises:
            OSError: the process does not answer, or not with a loan.
        """
        ...


@dataclass(slots=True)
class _PeerState:
    peer: GatewayPeer
    ask_again_at: float = 0.0
    unreported: set[str] = field(default_factory=set)
    """Names of keys whose given back slots the process does not know about yet."""


class LimitSharing:
    """Shares of all keys' limits in this process, and the exchange with the other processes."""

    def __init__(
        self,
        tenants: Callable[[], Iterable[Tenant]],
        find_tenant: Callable[[str], Tenant | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants, self._find_tenant, self._clock = tenants, find_tenant, clock
        self._name = ""
        self._peers: dict[str, _PeerState] = {}
        self._members, self._rank = 1, 0
        self._known = False
        self._exhausted_until: dict[tuple[str, LimitKind], float] = {}
        self._locks: dict[tuple[str, LimitKind], asyncio.Lock] = {}

    def set_members(self, name: str, peers: Mapping[str, GatewayPeer], *, joins: bool) -> None:
        """Divide the limits among this process and its peers.

        Args:
            name: name of this process.
            peers: the other processes, by name.
            joins: whether others served before this process started, so that they hold the whole limits. It
                only matters at the first call.
        """
        if self._known and name == self._name and self._peers.keys() == peers.keys():
            for other, peer in peers.items():
                self._peers[other].peer = peer  # the address may have changed
            return
        joins = joins and not self._known
        self._name, self._known = name, True
        self._peers = {other: _PeerState(peer) for other, peer in peers.items()}
        self._members, self._rank = len(peers) + 1, sorted([name, *peers]).index(name)
        self._exhausted_until.clear()
        log.info("API key limits are divided", extra={"fields": {"gateway_processes": self._members}})
        for tenant in self._tenants():
            if joins:
                tenant.empty_buckets()
            self.divide(tenant)

    def divide(self, tenant: Tenant) -> None:
        """Apply this process's share of the limits to a tenant, which may be new."""
        tenant.lender = self
        tenant.set_members(self._members, self._rank, self._peers.keys())

    async def borrow(self, tenant: Tenant, kind: LimitKind) -> None:
        """Ask the other processes for what the pending requests of a tenant lack, and add it to its share."""
        index = (tenant.name, kind)
        if not self._peers or self._clock() < self._exhausted_until.get(index, 0.0):
            return
        async with self._locks.setdefault(index, asyncio.Lock()):
            if tenant.missing(kind) <= 0:  # another request has borrowed enough
                return
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    await self._ask_peers(tenant, kind)
            except TimeoutError:
                pass
            if tenant.missing(kind) > 0:
                self._exhausted_until[index] = self._clock() + EXHAUSTED_SECONDS

    async def _ask_peers(self, tenant: Tenant, kind: LimitKind) -> None:
        left = 0.0
        for name, state in sorted(self._peers.items()):
            missing = tenant.missing(kind)
            if missing <= 0:
                return
            wanted = missing + tenant.amount_ahead(kind, AHEAD_SECONDS)
            loan = await self._ask(name, state, tenant, kind, wanted)
            if loan is not None:
                left += loan.left
                tenant.receive(kind, name, loan.granted, left)

    async def _ask(
        self, name: str, state: _PeerState, tenant: Tenant, kind: LimitKind, amount: float
    ) -> Loan | None:
        """Return the answer of a process; None if it does not answer."""
        if self._clock() < state.ask_again_at:
            return None
        held = tenant.borrowed_slots(name)
        if kind == "parallel":  # if the answer is lost, the number of lent slots is reported again
            state.unreported.add(tenant.name)
        try:
            loan = await state.peer.ask(LoanRequest(self._name, tenant.name, kind, amount, held))
        except OSError as error:
            state.ask_again_at = self._clock() + UNREACHABLE_SECONDS
            log.warning(
                "a gateway does not share limits", extra={"fields": {"name": name, "reason": str(error)}}
            )
            return None
        if kind == "parallel":
            state.unreported.discard(tenant.name)
        return loan

    def lend(self, request: LoanRequest) -> Loan:
        """Return the answer to another process; what it grants is no longer available in this process."""
        tenant = self._find_tenant(request.key)
        if tenant is None or request.borrower not in self._peers:
            return Loan(0.0)
        return Loan(*tenant.lend(request.kind, request.borrower, request.held, request.amount))

    async def run(self) -> None:
        """Give back borrowed slots that are no longer needed, until cancelled."""
        while True:
            await asyncio.sleep(GIVE_BACK_SECONDS)
            await self.give_back()

    async def give_back(self) -> None:
        """Give back borrowed slots that are no longer needed."""
        for tenant in list(self._tenants()):
            for name in tenant.give_back_slots():
                if name in self._peers:
                    self._peers[name].unreported.add(tenant.name)
        for name, state in list(self._peers.items()):
            for key in sorted(state.unreported):
                tenant = self._find_tenant(key)
                if tenant is None:
                    state.unreported.discard(key)
                    continue
                async with self._locks.setdefault((key, "parallel"), asyncio.Lock()):
                    await self._ask(name, state, tenant, "parallel", 0.0)

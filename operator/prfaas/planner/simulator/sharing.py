"""What is shared by all who use it at once: a line by its transfers, a decode instance by its sequences.

Everyone in a lane progresses alike, so one number per lane, the progress of somebody who has been there from the start,
says when each is done: at the progress at which he joined plus his own amount. Joining, leaving and a change of speed
cost O(log n), however many share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prfaas.planner.simulator.loop import Loop

Item = TypeVar("Item")
ROUNDING = 1e-7
"""Gbit or tokens that count as nothing."""


class Lane(Generic[Item]):
    """Users of one kind. Amounts are Gbit on a line, tokens on a decode instance."""

    def __init__(self, cap: float = math.inf) -> None:
        """`cap`: what one user gets at most, amount per second."""
        self.cap = cap
        self.rate = 0.0
        """What each gets now, amount per second."""
        self.progress = 0.0
        self.count = 0
        self._ends: list[tuple[float, int, Item]] = []
        self._joined = 0
        self._sum_of_ends = 0.0
        self._gone: set[int] = set()

    @property
    def left(self) -> float:
        """Amount still to be done for all of them."""
        return max(0.0, self._sum_of_ends - self.count * self.progress)

    def join(self, amount: float, item: Item) -> int:
        """Returns the number to `leave` with."""
        self._joined += 1
        end = self.progress + amount
        heapq.heappush(self._ends, (end, self._joined, item))
        self._sum_of_ends += end
        self.count += 1
        return self._joined

    def leave(self, number: int) -> Item:
        """Gone before its end; returns who it was."""
        end, item = next((end, item) for end, joined, item in self._ends if joined == number)
        self._gone.add(number)
        self._sum_of_ends -= end
        self.count -= 1
        return item

    def first(self) -> float:
        """Seconds until the first is done at the present rate; inf if there is none."""
        while self._ends and self._ends[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._ends)[1])
        if not self._ends:
            return math.inf
        left = self._ends[0][0] - self.progress
        return left / self.rate if self.rate > 0 else (math.inf if left > ROUNDING else 0.0)

    def done(self) -> list[Item]:
        """Take out who is done now."""
        found = []
        limit = self.progress + ROUNDING
        while self._ends and (self._ends[0][0] <= limit or self._ends[0][1] in self._gone):
            end, number, item = heapq.heappop(self._ends)
            if number in self._gone:
                self._gone.discard(number)
                continue
            self._sum_of_ends -= end
            self.count -= 1
            found.append(item)
        if not self._ends:
            self.progress = self._sum_of_ends = 0.0  # so that rounding does not grow with time
        return found


class Shared(Generic[Item]):
    """Lanes that share one resource. Subclasses say how much each user of a lane gets."""

    def __init__(self, loop: Loop, lanes: Sequence[Lane[Item]], done: Callable[[Item], None]) -> None:
        """`done` is called for everyone who has got his amount."""
        self._loop = loop
        self._done = done
        self._last = 0.0
        self._version = 0
        self.lanes = lanes
        self.served = 0.0
        """Amount done in all."""

    def speeds(self) -> None:
        """Set `rate` of every lane for the users there are now."""
        raise NotImplementedError

    def joined(self, item: Item, sign: int) -> None:
        """`item` has come (sign 1) or gone (-1), before speeds are set."""

    def join(self, lane: Lane[Item], amount: float, item: Item) -> int:
        """Begin; `done(item)` is called when `amount` is through."""
        self.advance()
        number = lane.join(amount, item)
        self.joined(item, 1)
        self.again()
        return number

    def leave(self, lane: Lane[Item], number: int) -> None:
        """End it without `done`."""
        self.advance()
        self.joined(lane.leave(number), -1)
        self.again()

    def advance(self) -> None:
        """Bring progress up to now: before anything that changes speeds."""
        passed = self._loop.now - self._last
        if passed > 0:
            for lane in self.lanes:
                step = lane.rate * passed
                lane.progress += step
                self.served += step * lane.count
        self._last = self._loop.now

    def again(self) -> None:
        """Speeds anew, and when the next is done."""
        self.speeds()
        self._version += 1
        wait = min(lane.first() for lane in self.lanes)
        if wait < math.inf:
            self._loop.at(self._loop.now + wait, self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self.advance()
        finished = [item for lane in self.lanes for item in lane.done()]
        for item in finished:
            self.joined(item, -1)
        self.again()
        for item in finished:
            self._done(item)


class Line(Shared[Item]):
    """A line that its transfers share fairly, each up to the limit of its lane (max-min fairness)."""

    def __init__(self, loop: Loop, gbps: float, lanes: Sequence[Lane[Item]], done: Callable[[Item], None]) -> None:
        """`gbps`: rate of the line, Gbit/s."""
        super().__init__(loop, sorted(lanes, key=lambda lane: lane.cap), done)
        self._gbps = gbps

    @property
    def gbps(self) -> float:
        """Rate now, Gbit/s."""
        return self._gbps

    def set_rate(self, gbps: float) -> None:
        """From now on; 0: it is cut, and transfers wait."""
        self.advance()
        self._gbps = gbps
        self.again()

    @property
    def transfers(self) -> int:
        """Transfers under way."""
        return sum(lane.count for lane in self.lanes)

    @property
    def gbit(self) -> float:
        """What is still to be moved, Gbit."""
        self.advance()
        return sum(lane.left for lane in self.lanes)

    def speeds(self) -> None:
        """Who is limited by his lane takes less than an even share, and leaves the rest to the others."""
        rest, users = self._gbps, self.transfers
        for lane in self.lanes:
            share = rest / users if users else 0.0
            lane.rate = min(lane.cap, share)
            rest -= lane.rate * lane.count
            users -= lane.count


class Batch(Shared[Item]):
    """Sequences that one instance decodes together: every step gives each of them `tokens_per_step` tokens."""

    def __init__(
        self,
        loop: Loop,
        tokens_per_second: Callable[[int, float], float],
        context: Callable[[Item], float],
        done: Callable[[Item], None],
    ) -> None:
        """`tokens_per_second(batch, mean context)`: of each sequence; `context(sequence)`: its tokens, on average."""
        super().__init__(loop, [Lane()], done)
        self._speed = tokens_per_second
        self._context_of = context
        self._context = 0.0

    def joined(self, item: Item, sign: int) -> None:
        """The sum of contexts."""
        self._context += sign * self._context_of(item)

    def speeds(self) -> None:
        """All progress alike."""
        lane = self.lanes[0]
        lane.rate = self._speed(lane.count, max(0.0, self._context) / lane.count) if lane.count else 0.0

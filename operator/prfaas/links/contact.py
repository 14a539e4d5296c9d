"""Whether there is contact with a peer: a small state machine over the results of probes.

Pure. One lost probe is no loss and one answered probe may be no return; the thresholds are the link's. Until the first
verdict nothing is known, which is a state of its own: a freshly started operator must neither declare a peer dead nor
alive, but leave standing what was known before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from prfaas.api.conditions import Reason


@dataclass(frozen=True)
class NotProbed:
    """No verdict yet."""


@dataclass(frozen=True)
class Connected:
    """The peer answers and its exchange is being read."""

    version: str
    """Of the peer's API server."""


@dataclass(frozen=True)
class NotConnected:
    """There is no contact. `reason` is one of those of CredentialsValid; `message` is for a person."""

    reason: Reason
    message: str
    lost_since: datetime


Contact = NotProbed | Connected | NotConnected
NOT_PROBED = NotProbed()


@dataclass(frozen=True)
class Counts:
    """Results in a row, of the kind that the present state does not expect."""

    failures: int = 0
    successes: int = 0


_NONE = Counts()


@dataclass(frozen=True)
class Tracker:
    """The contact and the counts. Each observation gives a new one."""

    failure_threshold: int
    success_threshold: int
    contact: Contact = NOT_PROBED
    counts: Counts = _NONE

    def answered(self, version: str) -> Tracker:
        """The peer answered and its exchange could be read."""
        successes = self.counts.successes + 1
        lost = isinstance(self.contact, NotConnected)
        if lost and successes < self.success_threshold:
            return self._with(self.contact, Counts(successes=successes))
        return self._with(Connected(version), Counts())

    def failed(self, reason: Reason, message: str, now: datetime) -> Tracker:
        """The peer did not answer, or did not let us read."""
        failures = self.counts.failures + 1
        if isinstance(self.contact, NotConnected):
            # Still lost, since the same moment. Another reason is news; another wording of the same one is noise.
            same = self.contact.reason == reason
            contact = self.contact if same else NotConnected(reason, message, self.contact.lost_since)
            return self._with(contact, Counts(failures=failures))
        if failures < self.failure_threshold:
            return self._with(self.contact, Counts(failures=failures))
        return self._with(NotConnected(reason, message, now), Counts(failures=failures))

    def _with(self, contact: Contact, counts: Counts) -> Tracker:
        return Tracker(self.failure_threshold, self.success_threshold, contact, counts)

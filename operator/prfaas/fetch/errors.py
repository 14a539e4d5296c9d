"""How a fetch fails: a reason of the condition `ModelCached`, and a sentence with the remedy.

Neither holds a secret or a moving number: the sentence ends in a condition.
"""

from __future__ import annotations

from prfaas.api.conditions import Reason


class FetchError(Exception):
    """It cannot go on as things are. `reason` is one of `FETCH_FAILURES`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Transient(FetchError):  # noqa: N818  # an adjective tells it from the failures that end a fetch
    """It may pass. `retry_after`: seconds for which the server asked, if it did."""

    def __init__(self, reason: Reason, message: str, retry_after: float | None = None) -> None:
        super().__init__(reason, message)
        self.retry_after = retry_after


def gigabytes(count: int) -> str:
    """Bytes for a person; small amounts in MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

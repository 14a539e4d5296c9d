"""When contact counts as lost, and when as regained."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.conditions import Reason
from prfaas.links.contact import Connected, NotConnected, NotProbed, Tracker

START = datetime(2026, 1, 1, tzinfo=UTC)


def after(results: str, *, failures: int = 3, successes: int = 2) -> Tracker:
    """`+` an answer, `-` none, `x` refused credentials; one each second."""
    tracker = Tracker(failures, successes)
    for second, result in enumerate(results):
        now = START + timedelta(seconds=second)
        match result:
            case "+":
                tracker = tracker.answered("v1")
            case "-":
                tracker = tracker.failed(Reason.UNREACHABLE, f"attempt {second}", now)
            case "x":
                tracker = tracker.failed(Reason.UNAUTHORIZED, "refused", now)
    return tracker


def test_nothing_is_known_before_the_first_verdict() -> None:
    assert after("").contact == NotProbed()
    assert after("--").contact == NotProbed()


def test_the_first_answer_connects_whatever_the_threshold() -> None:
    assert after("+").contact == Connected("v1")
    assert after("--+").contact == Connected("v1")


def test_lost_after_as_many_failures_in_a_row_as_the_threshold_says() -> None:
    assert after("+--").contact == Connected("v1")
    assert after("+--+--").contact == Connected("v1")
    contact = after("+---").contact
    assert contact == NotConnected(Reason.UNREACHABLE, "attempt 3", START + timedelta(seconds=3))


def test_back_after_as_many_answers_in_a_row_as_the_threshold_says() -> None:
    assert isinstance(after("+---+").contact, NotConnected)
    assert isinstance(after("+---+-+").contact, NotConnected)
    assert after("+---++").contact == Connected("v1")


def test_the_moment_of_loss_stays_and_so_does_the_wording_until_the_reason_changes() -> None:
    lost = NotConnected(Reason.UNREACHABLE, "attempt 3", START + timedelta(seconds=3))
    assert after("+-----").contact == lost
    assert after("+---+-").contact == lost
    assert after("+----x").contact == NotConnected(Reason.UNAUTHORIZED, "refused", lost.lost_since)


@given(st.text(alphabet="+-", max_size=40), st.integers(1, 5), st.integers(1, 5))
def test_the_state_changes_only_at_a_threshold(results: str, failures: int, successes: int) -> None:
    for end in range(1, len(results) + 1):
        before = after(results[: end - 1], failures=failures, successes=successes).contact
        now = after(results[:end], failures=failures, successes=successes).contact
        if isinstance(now, NotConnected) and not isinstance(before, NotConnected):
            assert results[:end].endswith("-" * failures)
        if isinstance(now, Connected) and isinstance(before, NotConnected):
            assert results[:end].endswith("+" * successes)

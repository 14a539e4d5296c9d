"""The picker: what becomes of one request, from its body to the decode instance that answers it.

    read the body -> decide (pure) -> prefill leg -> descriptor into the body -> forward

A leg that fails is tried once more, with what failed excluded, so the second decision may be another instance, another
link or the local pool. Envoy repeats a forwarded request once when the decode instance fails before its first byte;
that is a new attempt here: new decision, new leg, new descriptor. Nothing was sent to the client until then, so every
failure is a proper HTTP error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from prfaas.router import answers, body
from prfaas.router.answers import Forward, Reply
from prfaas.router.ledger import Entry, Ledger, Past
from prfaas.router.metrics import Metrics, decision_label
from prfaas.router.policies import PolicyStore
from prfaas.router.prefill import PASSED_ON, ClientFault, Failed, Outcome, PrefillClient, Prefilled, Trouble
from prfaas.routing.decision import Decision, Refusal, choose_decode, decide
from prfaas.routing.prompt import Prompt, measure
from prfaas.routing.world import Pools

NO_POLICY = "NoPolicy"
BAD_BODY = "BadBody"
PREFILL_FAILED = "PrefillFailed"
CLIENT_FAULT = "PrefillRefused"
NOT_ROUTED = "NotRouted"


@dataclass(frozen=True)
class Request:
    """One attempt as Envoy shows it."""

    stream_id: str
    attempt: int
    path: str
    headers: Mapping[str, str]
    """Lower-case names; the client's, without what is stripped at the door."""


@dataclass
class Picker:
    """Decides and runs prefill legs; knows nothing of Envoy's protocol."""

    policies: PolicyStore
    pools: Callable[[], Pools]
    synced: Callable[[], bool]
    ledger: Ledger
    legs: PrefillClient
    metrics: Metrics

    async def complete(self, request: Request, raw: bytes) -> Forward | Reply:
        """Answer one attempt of a completions request."""
        entry = self.ledger.begin((request.stream_id, request.attempt), request.path)
        past = self.ledger.past(request.stream_id)
        if request.attempt > 1:
            self.metrics.retries.inc()
            if past.reply is not None:
                entry.repeated = True
                return past.reply
        answer = await self._complete(request, raw, entry, past)
        if isinstance(answer, Reply):
            self.ledger.release(entry)
            entry.reason = answer.reason
            if answer.status == 503:
                self.ledger.remember(request.stream_id, Past(reply=answer))
        return answer

    async def _complete(self, request: Request, raw: bytes, entry: Entry, past: Past) -> Forward | Reply:
        if self.policies.current is None or not self.synced():
            return answers.error(503, NO_POLICY, "The router has no routing policy yet. Try again later.")
        try:
            client = body.parse(raw)
        except body.BadBodyError as error:
            return answers.error(400, BAD_BODY, str(error))
        prompt = measure(client.fields)

        failures: list[tuple[Decision, Failed]] = []
        for _ in range(2):
            failed_before = frozenset(decision.prefill.address for decision, _ in failures if decision.prefill)
            outcome = self._decide(request, entry, prompt, past, failed_before)
            if isinstance(outcome, Refusal):
                if failures:
                    break
                return answers.error(outcome.status, outcome.reason, outcome.message)
            if request.attempt == 1 and not failures:
                self.metrics.length.labels(decision_label(entry)).observe(prompt.tokens)
            if outcome.prefill is None:
                return self._forward(request, outcome, past, body.decode(client, None))
            result = await self._leg(request, outcome, body.prefill(client))
            match result:
                case Prefilled(kv):
                    return self._forward(request, outcome, past, body.decode(client, kv))
                case ClientFault(status, text, content_type):
                    return Reply(status, text, CLIENT_FAULT, content_type)
                case Failed():
                    failures.append((outcome, result))
        return _failed([failure for _, failure in failures])

    def _decide(
        self, request: Request, entry: Entry, prompt: Prompt, past: Past, failed: frozenset[str]
    ) -> Decision | Refusal:
        policy = self.policies.current
        assert policy is not None
        self.ledger.release(entry)
        outcome = decide(
            prompt,
            policy,
            self.pools(),
            self.ledger.load(),
            key=request.stream_id,
            exclude=past.decode | failed,
            prefer=past.prefill,
        )
        entry.outcome = outcome
        if isinstance(outcome, Decision):
            self.ledger.hold(entry, outcome.decode.address)
        return outcome

    async def _leg(self, request: Request, decision: Decision, text: bytes) -> Outcome:
        assert decision.prefill is not None
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["x-request-id"] = request.headers.get("x-request-id", request.stream_id)
        began, result = time.monotonic(), "cancelled"
        try:
            with self.ledger.leg(decision.prefill.address):
                outcome = await self.legs.run(decision.prefill, request.path, text, headers)
            result = _result(outcome)
        finally:
            self.metrics.legs.labels(decision.link or "", result).observe(time.monotonic() - began)
        self._learn(decision, outcome)
        return outcome

    def _learn(self, decision: Decision, outcome: Outcome) -> None:
        """Whom to leave alone for a while. What a client did wrong is nobody's fault here."""
        assert decision.prefill is not None
        trouble = outcome.trouble if isinstance(outcome, Failed) else None
        if trouble is Trouble.UNREACHABLE and decision.link is not None:
            # Nobody answered at all: the line, not the instance. Else each of its instances would cost a timeout.
            self.ledger.refused(endpoint.address for endpoint in self.pools().remote.get(decision.link, ()))
        elif trouble in (Trouble.UNREACHABLE, Trouble.REFUSED, Trouble.BROKEN):
            self.ledger.refused([decision.prefill.address])
        else:
            self.ledger.answered(decision.prefill.address)

    def _forward(self, request: Request, decision: Decision, past: Past, text: bytes | None) -> Forward:
        used = decision.prefill.address if decision.prefill else None
        tried = past.decode | {decision.decode.address}
        self.ledger.remember(request.stream_id, replace(past, decode=tried, prefill=used))
        self.metrics.forwarded(decision)
        return Forward(decision.decode.address, str(decision), text)

    def plain(self, request: Request) -> Forward | Reply:
        """A request without a prompt, which any decode instance can answer."""
        entry = self.ledger.begin((request.stream_id, request.attempt), request.path)
        past = self.ledger.past(request.stream_id)
        entry.reason = NOT_ROUTED
        found = choose_decode(self.pools(), self.ledger.load(), key=request.stream_id, exclude=past.decode)
        if found is None:
            entry.repeated = request.attempt > 1
            return answers.error(503, "NoDecodeInstance", "No decode instance is ready. Try again later.")
        self.ledger.hold(entry, found.address)
        self.ledger.remember(request.stream_id, Past(decode=past.decode | {found.address}))
        return Forward(found.address, f"none; reason={NOT_ROUTED}")

    def health(self, request: Request) -> Reply:
        """Whether a completions request could be served at all."""
        entry = self.ledger.begin((request.stream_id, request.attempt), request.path)
        entry.reason, entry.repeated = NOT_ROUTED, request.attempt > 1
        if self.policies.current is None or not self.synced():
            return answers.error(503, NO_POLICY, "The router has no routing policy yet.")
        if not self.pools().decode:
            return answers.error(503, "NoDecodeInstance", "No decode instance is ready.")
        return Reply(200, b"", NOT_ROUTED)


def _result(outcome: Outcome) -> str:
    match outcome:
        case Prefilled():
            return "ok"
        case ClientFault():
            return "client"
        case Failed(trouble):
            return trouble.value


def _failed(failures: list[Failed]) -> Reply:
    """The error for a prompt that nobody could prefill. 503: may work later; 502: an instance misbehaved."""
    last = failures[-1]
    later = (Trouble.UNREACHABLE, Trouble.REFUSED, Trouble.OVERLOADED)
    status = 504 if last.trouble is Trouble.TIMEOUT else 503 if last.trouble in later else 502
    tried = "one instance" if len(failures) == 1 else f"{len(failures)} instances"
    message = f"The prompt could not be prefilled: {tried} failed, the last with {last.trouble.value}."
    return answers.error(status, PREFILL_FAILED, message)

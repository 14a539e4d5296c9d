"""Tokens in, tokens out: tokenize and detokenize, rendering and its reverse, and generation from token ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from aiohttp import web

from prfaas.worker.answers import DONE, Head, Outcome, error_event, event, whole_answer
from prfaas.worker.errors import ApiError, bad_body, bad_request, internal_error
from prfaas.worker.fields import check_model, parse_object, text_or_ids
from prfaas.worker.logprobs import answer_ids, chat_logprobs, prompt_logprobs
from prfaas.worker.openai import Asked, chat_request, completion_request, sampling_of
from prfaas.worker.oracle import BYTES_PER_TOKEN, chat_prompt, from_token_ids, token_ids
from prfaas.worker.refusals import check_length, check_limit, check_sampling
from prfaas.worker.routes.bodies import answer_headers, read_body
from prfaas.worker.routes.messages import as_chat as messages_as_chat
from prfaas.worker.routes.responses import as_chat as responses_as_chat
from prfaas.worker.serving import Run, Serving, answer_base

_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n"


class Tokens:
    """The routes that speak in token ids."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize: of text, or of a rendered chat."""
        fields = parse_object(await read_body(http))
        check_model(fields, self._serving.limits())
        if "messages" in fields:
            text = _rendered(fields)
        elif isinstance(fields.get("prompt"), str):
            text = text_or_ids(fields["prompt"], "prompt")
        else:
            raise bad_body("prompt must be a string, or messages a list", "prompt")
        tokens = token_ids(text)
        shown = None
        if fields.get("return_token_strs"):
            parts = range(0, len(text), BYTES_PER_TOKEN)
            shown = [text[i : i + BYTES_PER_TOKEN].decode(errors="replace") for i in parts]
        length = self._serving.config.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": shown})

    async def detokenize(self, http: web.Request) -> web.Response:
        """POST /detokenize."""
        fields = parse_object(await read_body(http))
        check_model(fields, self._serving.limits())
        if not isinstance(fields.get("tokens"), list):
            raise bad_body("tokens must be a list of token ids", "tokens")
        return web.json_response({"prompt": text_or_ids(fields["tokens"], "tokens").decode(errors="replace")})

    async def tokenizer_info(self, _: web.Request) -> web.Response:
        """GET /tokenizer_info."""
        return web.json_response(
            {
                "tokenizer_class": "FourByteTokenizer",
                "model_max_length": self._serving.config.max_model_len,
                "chat_template": _TEMPLATE,
            }
        )

    async def render_chat(self, http: web.Request) -> web.Response:
        """POST /v1/chat/completions/render."""
        fields = parse_object(await read_body(http))
        return web.json_response(self._rendered_request(http, fields, chat_request(fields, self._serving.limits()))[0])

    async def render_completion(self, http: web.Request) -> web.Response:
        """POST /v1/completions/render: one request per prompt."""
        fields = parse_object(await read_body(http))
        asked = completion_request(fields, self._serving.limits())
        return web.json_response(self._rendered_request(http, fields, asked))

    async def render_messages(self, http: web.Request) -> web.Response:
        """POST /v1/messages/render."""
        fields = messages_as_chat(parse_object(await read_body(http)))
        return web.json_response(self._rendered_request(http, fields, chat_request(fields, self._serving.limits()))[0])

    async def render_responses(self, http: web.Request) -> web.Response:
        """POST /v1/responses/render."""
        fields = responses_as_chat(parse_object(await read_body(http)), None)
        return web.json_response(self._rendered_request(http, fields, chat_request(fields, self._serving.limits()))[0])

    async def derender_chat(self, http: web.Request) -> web.Response:
        """POST /v1/chat/completions/derender."""
        return await self._derender(http, chat=True)

    async def derender_completion(self, http: web.Request) -> web.Response:
        """POST /v1/completions/derender."""
        return await self._derender(http, chat=False)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST /inference/v1/generate: token ids in, token ids out."""
        serving = self._serving
        fields = parse_object(await read_body(http))
        asked = self._generation(fields)
        base = answer_base(http, asked.request_id)
        run = await serving.begin(http, asked, f"generate-tokens-{base}", indexed=False)
        asked = run.asked  # without its prompt
        del fields
        try:
            if asked.stream:
                return await self._stream(http, run, base)
            outcomes = await serving.outcomes(run)
            return web.json_response(self._generated(run, base, outcomes))
        finally:
            serving.end(run)

    async def abort(self, http: web.Request) -> web.Response:
        """POST /inference/v1/abort_requests, and /abort_requests with --tokens-only."""
        try:
            fields = json.loads(await read_body(http))
        except ValueError as error:
            raise ApiError(400, "Bad Request", f"JSON decode error: {error}") from error
        ids = fields.get("request_ids") if isinstance(fields, dict) else None
        if ids is None:
            raise ApiError(400, "Bad Request", "Missing 'request_ids' in request body")
        self._serving.abort([str(each) for each in ids])
        return web.Response()

    def _generation(self, fields: Mapping[str, Any]) -> Asked:
        limits = self._serving.limits()
        ids, parameters = fields.get("token_ids"), fields.get("sampling_params")
        if not isinstance(ids, list) or not ids:
            raise bad_body("token_ids: List should have at least 1 item", "token_ids")
        if not isinstance(parameters, dict):
            raise bad_body("sampling_params must be an object", "sampling_params")
        check_sampling(parameters)
        model, prompt = check_model(fields, limits), text_or_ids(ids, "token_ids")
        limit, n = parameters.get("max_tokens", 16), parameters.get("n") or 1
        sampling = sampling_of(parameters, limits)
        check_limit(limit, sampling.min_tokens, "max_tokens")
        check_length(len(ids), limit, limits)
        logprobs, prompt_probabilities = parameters.get("logprobs"), parameters.get("prompt_logprobs")
        kv_params = fields.get("kv_transfer_params")
        return Asked(
            chat=False,
            model=model,
            prompts=(prompt,),
            prompt_tokens=(len(ids),),
            max_tokens=limit,
            n=n,
            sampling=sampling,
            stream=bool(fields.get("stream")),
            request_id=fields.get("request_id"),
            kv_params=kv_params if isinstance(kv_params, dict) else None,
            priority=fields.get("priority") or 0,
            cache_salt=fields.get("cache_salt"),
            adapter=model if model in limits.adapters else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_probabilities,
            return_ids=True,
        )

    def _generated(self, run: Run, base: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        asked = run.asked
        wanted = asked.prompt_logprobs
        return {
            "request_id": base,
            "model": asked.model,
            "created": run.head.created,
            "usage": self._serving.usage(run, details=True),
            "prompt_logprobs": None if wanted is None else prompt_logprobs(outcomes[0].prompt, wanted),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": self._serving.metrics(run),
            "kv_transfer_params": run.generations[0].kv_params,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [_choice(asked, index, outcome) for index, outcome in enumerate(outcomes)],
        }

    async def _stream(self, http: web.Request, run: Run, base: str) -> web.StreamResponse:
        headers = answer_headers(http, self._serving.config.request_id_headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | headers)
        await response.prepare(http)
        async for part in self._events(run, base):
            await response.write(part)
        await response.write_eof()
        return response

    async def _events(self, run: Run, base: str) -> AsyncIterator[bytes]:
        words: dict[int, Iterator[str]] = {}
        async for index, fresh, reason in self._serving.merged(run):
            generation = run.generations[index]
            if reason == "error":
                yield error_event(internal_error()) + DONE
                return
            said = tuple(islice(words.setdefault(index, self._serving.words(generation)), len(fresh)))
            choice = _choice(run.asked, index, Outcome("", said, reason or "", None))
            body: dict[str, Any] = {
                "request_id": base,
                "output_mode": "tokens",
                "choices": [choice | {"finish_reason": reason}],
            }
            if generation.kv_params is not None:
                body["kv_transfer_params"] = generation.kv_params
            yield event(body)
        yield DONE

    def _rendered_request(self, http: web.Request, fields: Mapping[str, Any], asked: Asked) -> list[dict[str, Any]]:
        prefix = "chatcmpl" if asked.chat else "cmpl"
        base = f"{prefix}-{answer_base(http, asked.request_id)}"
        sampling = {
            "max_tokens": asked.max_tokens,
            "min_tokens": asked.sampling.min_tokens,
            "n": asked.n,
            "stop": list(asked.sampling.stop),
            "stop_token_ids": list(asked.sampling.stop_token_ids),
            "include_stop_str_in_output": asked.sampling.include_stop,
            "logprobs": asked.logprobs,
            "prompt_logprobs": asked.prompt_logprobs,
        }
        return [
            {
                "request_id": base if asked.chat else f"{base}-{index}",
                "token_ids": token_ids(prompt),
                "token_offsets": None,
                "features": None,
                "sampling_params": sampling,
                "model": asked.model,
                "stream": asked.stream,
                "cache_salt": asked.cache_salt,
                "priority": asked.priority,
                "kv_transfer_params": fields.get("kv_transfer_params"),
            }
            for index, prompt in enumerate(asked.prompts)
        ]

    async def _derender(self, http: web.Request, *, chat: bool) -> web.Response:
        """From token ids to the body of the endpoint that a client called."""
        fields = parse_object(await read_body(http))
        generated = fields.get("generate_response")
        choices = generated.get("choices") if isinstance(generated, dict) else None
        if not isinstance(generated, dict) or not isinstance(choices, list) or not choices:
            raise bad_body("generate_response must be an answer of /inference/v1/generate", "generate_response")
        model = check_model({"model": fields.get("model") or generated.get("model")}, self._serving.limits())
        outcomes = []
        for choice in choices:
            text = from_ids(choice.get("token_ids"))
            outcomes.append(Outcome(text, (), choice.get("finish_reason") or "stop", None))
        prefix = "chatcmpl" if chat else "cmpl"
        head = Head(
            f"{prefix}-{generated.get('request_id')}",
            generated.get("created") or 0,
            model,
            self._serving.config.front.fingerprint,
        )
        asked = Asked(chat, model, (b"",), (0,), None)
        counted = generated.get("usage") or {}
        return web.json_response(whole_answer(asked, head, outcomes, counted, generated.get("kv_transfer_params")))


def from_ids(ids: object) -> str:
    """The text of an answer's token ids."""
    if not isinstance(ids, list):
        raise bad_request("token_ids must be a list of token ids", "token_ids")
    try:
        return from_token_ids(ids).decode(errors="replace")
    except (OverflowError, TypeError, AttributeError) as error:
        raise bad_request("token_ids must be a list of token ids", "token_ids") from error


def _choice(asked: Asked, index: int, outcome: Outcome) -> dict[str, Any]:
    logprobs = None
    if asked.logprobs is not None:
        logprobs = chat_logprobs(outcome.words, asked.logprobs, as_ids=True)
    return {
        "index": index,
        "token_ids": answer_ids(outcome.words),
        "logprobs": logprobs,
        "finish_reason": outcome.finish_reason,
        "routed_experts": None,
    }


def _rendered(fields: Mapping[str, Any]) -> bytes:
    messages = fields["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise bad_body("messages must be a list of objects", "messages")
    to_answer, open_end = fields.get("add_generation_prompt"), bool(fields.get("continue_final_message"))
    if open_end and to_answer:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        return chat_prompt(messages, to_answer=to_answer is not False, open_end=open_end).encode()
    except ValueError as error:
        raise bad_request(str(error), "messages") from error

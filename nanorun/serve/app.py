"""The OpenAI API on a model of ours, and the page.

    POST /v1/chat/completions   a chat model answers
    POST /v1/completions        any model goes on with a text
    GET  /v1/models             the one model
    GET  /health                200, or 503 while shutting down or broken
    GET  /metrics               for Prometheus
    GET  /                      what lies in web/

A request goes through guard.py (host, key, size), schema.py (its fields), desk.py (room for it), prompts.py
(its tokens) and answer.py (what comes back). Nothing on the way blocks the event loop: long prompts are
encoded in a thread, and each engine has a process of its own (remote.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from nanorun import __version__
from nanorun.errors import UserError
from nanorun.infer import request as infer
from nanorun.serve.answer import Answer, Order
from nanorun.serve.desk import Desk
from nanorun.serve.errors import ApiError, from_validation
from nanorun.serve.guard import Guard
from nanorun.serve.metrics import CONTENT_TYPE, Metrics
from nanorun.serve.options import Options
from nanorun.serve.prompts import Prompts
from nanorun.serve.remote import RemoteSpeaker
from nanorun.serve.schema import ChatRequest, CompletionRequest, Generation
from nanorun.serve.suggestions import suggest

WEB = Path(__file__).parent / "web"
LEFT_OUT = "nanorun-left-out"  # how many of the oldest messages did not fit
QUICK = 4_096  # characters that are encoded at once, without a thread

_ERROR = {
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    "description": "OpenAI's error object",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: _ERROR for status in (400, 401, 403, 404, 405, 408, 413, 422, 429, 500, 503)
}
_ANSWER = {
    "description": "OpenAI's completion object, or a stream of its chunks",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class Service:
    """One model behind the routes."""

    def __init__(self, speaker: RemoteSpeaker, options: Options) -> None:
        self.speaker, self.options, self.limits = speaker, options, options.limits
        self.metrics = Metrics()
        self.desk = Desk(speaker.engines, options.limits.queue, self.metrics)
        self.prompts = Prompts(speaker.tokenizer, speaker.engines[0].context)
        self.created = int(time.time())
        self.fingerprint = f"nanorun-{__version__}-step-{speaker.step}"
        special = speaker.tokenizer.special
        self.text_stop_ids = list(special.values())  # a text ends where anything begins that is no text

    async def chat(self, asked: ChatRequest) -> Response:
        self._check(asked)
        speaker = self.speaker
        if not speaker.chats:
            raise ApiError(
                400,
                f"'{speaker.name}' is a base model, which only continues text: use /v1/completions.",
                param="model",
                code="not_a_chat_model",
            )
        if len(asked.messages) > self.limits.messages:
            raise ApiError(
                400,
                f"There are {len(asked.messages)} messages, and {self.limits.messages} may be: leave some out.",
                param="messages",
                code="too_many_messages",
            )
        size = sum(message.size for message in asked.messages)
        max_tokens = self._max_tokens(asked.max_completion_tokens or asked.max_tokens)
        truncate = asked.truncation == "auto"
        left_out = 0

        def encode() -> list[list[int]]:
            nonlocal left_out
            ids, left_out = self.prompts.of_messages(asked.messages, truncate, max_tokens)
            return [ids]

        common = {"logprobs": asked.wanted_logprobs, "stop_ids": speaker.stop_ids, "tool": speaker.tool}
        answer = await self._answer(asked, size, 1, encode, chat=True, max_tokens=max_tokens, **common)
        if left_out:
            answer.headers[LEFT_OUT] = str(left_out)
        return answer

    async def complete(self, asked: CompletionRequest) -> Response:
        self._check(asked)
        prompts = asked.prompts

        def encode() -> list[list[int]]:
            return [self.prompts.of_text(prompt) for prompt in prompts]

        common = {"logprobs": asked.logprobs, "stop_ids": self.text_stop_ids}
        max_tokens = self._max_tokens(asked.max_tokens or 16)  # as OpenAI's
        size = sum(map(len, prompts))
        return await self._answer(
            asked, size, len(prompts), encode, chat=False, max_tokens=max_tokens, **common
        )

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model()]}

    def model(self) -> dict[str, Any]:
        speaker, sampling = self.speaker, self.options.sampling
        card = {"id": speaker.name, "object": "model", "created": self.created, "owned_by": "nanorun"}
        described = {
            "kind": "chat" if speaker.chats else "base",
            "context": self.prompts.context,
            "parameters": speaker.parameters,
            "step": speaker.step,
            "tool": speaker.tool_name,
            "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
            "suggestions": suggest(speaker.data, speaker.chats),
        }
        return {**card, "nanorun": described}

    def health(self) -> tuple[int, dict[str, Any]]:
        broken = any(engine.broken for engine in self.speaker.engines)
        status = "broken" if broken else "draining" if self.desk.draining else "ok"
        gauges = {name.removeprefix("nanorun_"): value for name, (_, value) in self.desk.gauges().items()}
        figures = {"slots": gauges["slots"], "slots_busy": gauges["slots_busy"], "queue": gauges["queue"]}
        return 200 if status == "ok" else 503, {"status": status, "model": self.speaker.name, **figures}

    def _check(self, asked: Generation) -> None:
        name = self.speaker.name
        if asked.model is not None and asked.model != name:
            said = f"The model '{asked.model:.60}' does not exist or you do not have access to it: here is '{name}'."
            raise ApiError(404, said, param="model", code="model_not_found")
        asked.check()

    def _max_tokens(self, wanted: int | None) -> int | None:
        most = self.limits.tokens
        return wanted if most is None else min(wanted or most, most)

    async def _answer(
        self,
        asked: Generation,
        size: int,
        prompts: int,
        encode: Callable[[], list[list[int]]],
        *,
        chat: bool,
        **common: Any,
    ) -> Answer:
        samples = asked.n or 1
        if prompts * samples > min(self.limits.samples, self.desk.most):
            most = min(self.limits.samples, self.desk.most)
            said = f"{prompts * samples} answers are asked for, and {most} may be: ask for fewer at a time."
            raise ApiError(400, said, param="n", code="invalid_value")
        delivery = self.desk.admit(prompts * samples)
        try:
            ids = encode() if size <= QUICK else await run_sync(encode)
            sampling = self._sampling(asked)
            requests = [
                infer.Request(
                    prompt, sampling, stop=asked.stops, samples=samples, stream=bool(asked.stream), **common
                )
                for prompt in ids
            ]
            order = Order(
                requests, self.speaker.name, self.fingerprint, chat, bool(asked.stream), asked.wants_usage
            )
            return Answer(order, delivery, self.speaker.tokenizer, self.limits, self.metrics)
        except UserError as error:
            delivery.close()
            raise ApiError(400, str(error), code="invalid_value") from error
        except BaseException:
            delivery.close()
            raise

    def _sampling(self, asked: Generation) -> infer.Sampling:
        names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed")
        values = {
            name: getattr(self.options.sampling, name)
            if getattr(asked, name) is None
            else getattr(asked, name)
            for name in names
        }
        if values["top_p"] == 0:  # to OpenAI: the likeliest
            values["top_p"], values["temperature"] = 1.0, 0.0
        return infer.Sampling(**values)


def build(service: Service, web: Path = WEB) -> FastAPI:
    app = FastAPI(title="nanorun", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service

    @app.post("/v1/chat/completions", responses={200: _ANSWER, **_ERRORS}, response_model=None)
    async def chat_completions(asked: Annotated[ChatRequest, Body()]) -> Response:
        return await service.chat(asked)

    @app.post("/v1/completions", responses={200: _ANSWER, **_ERRORS}, response_model=None)
    async def completions(asked: Annotated[CompletionRequest, Body()]) -> Response:
        return await service.complete(asked)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{name}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        if name != service.speaker.name:
            raise ApiError(
                404, f"The model '{name:.60}' does not exist.", param="model", code="model_not_found"
            )
        return service.model()

    @app.get("/health", responses={503: {"description": "shutting down, or broken"}})
    async def health(response: Response) -> dict[str, Any]:
        response.status_code, said = service.health()
        return said

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(service.desk.gauges()), media_type=CONTENT_TYPE)

    for path, file in _page(web).items():
        app.add_api_route(path, _file(file), methods=["GET", "HEAD"], include_in_schema=False)
    _answer_errors(app)
    paths = [route.path for route in app.routes if hasattr(route, "path") and "{" not in route.path]
    options = service.options
    app.add_middleware(Guard, options=options, metrics=service.metrics, paths=paths)
    if options.cors:
        headers = ["authorization", "content-type"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors),
            allow_methods=["GET", "POST"],
            allow_headers=headers,
        )
    _describe_errors(app)
    return app


def _page(web: Path) -> dict[str, Path]:
    """A route for each file there is at the start, so that no path leads anywhere else."""
    files = sorted(path for path in web.rglob("*") if path.is_file() and not path.name.startswith("."))
    routes = {f"/{path.relative_to(web).as_posix()}": path for path in files}
    if "/index.html" in routes:
        routes["/"] = routes["/index.html"]
    return routes


def _file(path: Path) -> Callable[..., Any]:
    async def read(request: Request) -> Response:
        response = FileResponse(path, stat_result=path.stat())  # with the file's ETag
        if request.headers.get("if-none-match") == response.headers["etag"]:
            return Response(status_code=304, headers={"etag": response.headers["etag"]})
        return response

    return read


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        said = {404: f"There is nothing at {request.url.path:.100}.", 405: "This method is not allowed here."}
        headers = dict(error.headers or {})
        return ApiError(
            error.status_code, said.get(error.status_code, str(error.detail)), headers=headers
        ).response()


def _describe_errors(app: FastAPI) -> None:
    """The schema as FastAPI makes it, with OpenAI's errors in place of its own."""
    usual = app.openapi

    def described() -> dict[str, Any]:
        schema = usual()
        schema["components"]["schemas"]["Error"] = _ERROR_SCHEMA
        return schema

    app.openapi = described  # type: ignore[method-assign]

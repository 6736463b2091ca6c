"""The OpenAI API for one of our models, and the chat page.

    POST /v1/chat/completions   a chat model answers
    POST /v1/completions        any model continues a text
    GET  /v1/models             the one model
    GET  /health                200, or 503 while shutting down, or if an engine is broken or silent
    GET  /metrics               for Prometheus
    GET  /                      the files of web/

A request passes connection.py (its arrival), middleware.py (host, key, size), parsing.py and schema.py (its fields),
the dispatcher of engines.py (capacity), prompts.py (its tokens) and response.py (the response). Nothing blocks the
event loop: a body has a limited number of values, long prompts are encoded in a thread, and each engine has its own
process (worker.py).
"""

import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from anyio.to_thread import run_sync
from fastapi import Body, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from nanorun import __version__
from nanorun.errors import UserError
from nanorun.infer.request import Request as EngineRequest
from nanorun.infer.request import Sampling
from nanorun.serve.engines import Dispatcher, RemoteModel
from nanorun.serve.errors import ApiError, ErrorObject, not_an_object
from nanorun.serve.metrics import CONTENT_TYPE, Metrics
from nanorun.serve.middleware import SecurityMiddleware
from nanorun.serve.options import ServeOptions
from nanorun.serve.parsing import parse_body
from nanorun.serve.prompts import PromptEncoder
from nanorun.serve.response import CompletionResponse
from nanorun.serve.schema import ChatRequest, CompletionRequest, Generation, StreamOptions

WEB = Path(__file__).parent / "web"
LEFT_OUT = "nanorun-left-out"  # the header with the number of messages that did not fit
SHORT = 4_096  # characters that are encoded without a thread
# Prompts that the page suggests, which the model has a chance to know: by its data and its kind.
SUGGESTIONS = {
    ("sample", "chat"): {
        "The Lantern Isles": "What work does Jasper do?",
        "Sums": "What is 12 + 30?",
        "Spelling": "How do you spell lantern?",
        "The model": "Who are you?",
    },
    ("sample", "base"): {
        "A person": "Jasper lives in",
        "A place": "The village of Candlebay",
        "A story": "One morning Odo",
        "A sum": "12 + 30 =",
    },
    ("any", "chat"): {
        "Explain": "Why is the sky blue?",
        "Sums": "What is 17 * 23?",
        "Write": "Write a short poem about the sea.",
        "Spelling": "How many r are in strawberry?",
    },
    ("any", "base"): {
        "A fact": "The capital of France is",
        "A story": "Once upon a time, there was a",
        "An explanation": "The sky is blue because",
        "A list": "The planets of the solar system are:",
    },
}

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorObject, "description": "OpenAI's error object"}
    for status in (400, 401, 403, 404, 405, 408, 413, 422, 429, 500, 503)
}
_COMPLETION = {
    "description": "OpenAI's completion object, or a stream of its chunks",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
}


class Service:
    """The model behind the routes."""

    def __init__(self, model: RemoteModel, options: ServeOptions) -> None:
        self.model, self.options, self.limits = model, options, options.limits
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(model.engines, options.limits.queue, self.metrics)
        self.prompts = PromptEncoder(model.tokenizer, model.engines[0].context)
        self.created = int(time.time())
        self.fingerprint = f"nanorun-{__version__}-step-{model.step}"

    async def chat_completions(self, body: Annotated[ChatRequest, Body()]) -> Response:
        self._check_model(body)
        model = self.model
        if not model.is_chat_model:
            message = f"'{model.name}' is a base model, which only continues text: use /v1/completions."
            raise ApiError(400, message, "not_a_chat_model", "model")
        max_tokens = self._max_tokens(body.max_completion_tokens or body.max_tokens)
        return await self._complete(
            body,
            lambda: self.prompts.encode_messages(body.messages, body.truncation == "auto", max_tokens),
            characters=sum(message.size for message in body.messages),
            prompts=1,
            is_chat=True,
            max_tokens=max_tokens,
            logprobs=body.logprobs_per_token,
            stop_ids=model.stop_ids,
            tool=model.tool,
        )

    async def completions(self, body: Annotated[CompletionRequest, Body()]) -> Response:
        self._check_model(body)
        prompts = body.prompts
        return await self._complete(
            body,
            lambda: self.prompts.encode_texts(prompts),
            characters=sum(map(len, prompts)),
            prompts=len(prompts),
            is_chat=False,
            max_tokens=self._max_tokens(body.max_tokens or 16),  # OpenAI's default
            logprobs=body.logprobs,
            stop_ids=list(self.model.tokenizer.special.values()),
        )

    async def _complete(
        self,
        body: Generation,
        encode: Callable[[], tuple[list[list[int]], int]],
        *,
        characters: int,
        prompts: int,
        is_chat: bool,
        **common: Any,  # fields of the engine's requests
    ) -> Response:
        samples = body.n or 1
        max_samples = min(self.limits.samples, self.dispatcher.max_samples)
        if prompts * samples > max_samples:
            message = f"Too many answers: {prompts * samples} (at most {max_samples} per request)."
            raise ApiError(400, message, "invalid_value", "n")
        stream = self.dispatcher.admit(prompts * samples)
        try:
            encoded, left_out = encode() if characters <= SHORT else await run_sync(encode)
            common |= {"stop": body.stops, "samples": samples}
            common["stream"] = bool(body.stream) or common["logprobs"] is not None  # too many for one event
            sampling = self._sampling(body)
            requests = [EngineRequest(prompt, sampling, **common) for prompt in encoded]
            model = {"model": self.model.name, "system_fingerprint": self.fingerprint}
            stream_options = body.stream_options or StreamOptions()
            response = CompletionResponse(
                requests,
                stream,
                self.limits,
                self.metrics,
                self.model.tokenizer,
                model=model,
                chat=is_chat,
                stream=bool(body.stream),
                include_usage=bool(stream_options.include_usage),
                continuous_usage=bool(stream_options.continuous_usage_stats),
            )
        except UserError as error:
            stream.close()
            raise ApiError(400, str(error), "invalid_value") from error
        except BaseException:
            stream.close()
            raise
        if left_out:
            response.headers[LEFT_OUT] = str(left_out)
        return response

    def describe_model(self) -> dict[str, Any]:
        model, sampling = self.model, self.options.sampling
        kind = "chat" if model.is_chat_model else "base"
        suggestions = SUGGESTIONS["sample" if model.data == "sample" else "any", kind]
        described = {
            "kind": kind,
            "context": self.prompts.context,
            "parameters": model.parameters,
            "step": model.step,
            "tool": model.tool_name,
            "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
            "suggestions": [{"label": label, "text": text} for label, text in suggestions.items()],
        }
        card = {"id": model.name, "object": "model", "created": self.created, "owned_by": "nanorun"}
        return {**card, "nanorun": described}

    def health(self) -> tuple[int, dict[str, Any]]:
        status = "ok"
        if any(engine.broken for engine in self.model.engines):
            status = "broken"
        elif any(engine.silent for engine in self.model.engines):
            status = "silent"
        elif self.dispatcher.draining:
            status = "draining"
        busy, queued = self.dispatcher.occupancy
        figures = {"slots": self.dispatcher.slots, "slots_busy": busy, "queue": queued}
        return 200 if status == "ok" else 503, {"status": status, "model": self.model.name, **figures}

    def _check_model(self, body: Generation) -> None:
        name = self.model.name
        if body.model is not None and body.model != name:
            message = f"The model '{body.model:.60}' does not exist: this server has '{name}'."
            raise ApiError(404, message, "model_not_found", "model")

    def _max_tokens(self, wanted: int | None) -> int | None:
        limit = self.limits.tokens
        return wanted if limit is None else min(wanted or limit, limit)

    def _sampling(self, body: Generation) -> Sampling:
        values = vars(self.options.sampling).copy()
        values |= {name: value for name in values if (value := getattr(body, name)) is not None}
        if values["top_p"] == 0:  # OpenAI: the most likely token
            values["top_p"], values["temperature"] = 1.0, 0.0
        return Sampling(**values)


class BodyRoute(APIRoute):
    """FastAPI documents the body, `parse_body` parses it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, kind = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            try:
                if not re.fullmatch(r"application/(.+\+)?json", content_type):
                    raise not_an_object()
                data = b"".join([chunk async for chunk in request.stream()])
                response: Response = await endpoint(parse_body(data, kind))
            except ApiError as error:
                # FastAPI would keep it in a reference cycle, and with it the body, until the next collection.
                return error.response()
            return response

        return handle


def build_app(service: Service, web: Path = WEB) -> FastAPI:
    app = FastAPI(title="nanorun", version=__version__, docs_url=None, redoc_url=None)

    for path, endpoint in (
        ("/v1/chat/completions", service.chat_completions),
        ("/v1/completions", service.completions),
    ):
        app.router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            responses={200: _COMPLETION, **_ERRORS},
            response_model=None,
            route_class_override=BodyRoute,
        )

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe_model()]}

    @app.get("/v1/models/{name}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        if name != service.model.name:
            raise ApiError(404, f"The model '{name:.60}' does not exist.", "model_not_found", "model")
        return service.describe_model()

    @app.get("/health", responses={503: {"description": "shutting down, broken, or silent"}})
    async def health(response: Response) -> dict[str, Any]:
        response.status_code, body = service.health()
        return body

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(service.dispatcher.gauges()), media_type=CONTENT_TYPE)

    _add_page(app, web)
    _add_error_handlers(app)
    paths = [route.path for route in app.routes if hasattr(route, "path") and "{" not in route.path]
    options = service.options
    app.add_middleware(SecurityMiddleware, options=options, metrics=service.metrics, paths=paths)
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _add_page(app: FastAPI, web: Path) -> None:
    """A route for each file that exists at the start, so that no path leads anywhere else."""
    for path in sorted(web.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue

        async def read(request: Request, path: Path = path) -> Response:
            response = FileResponse(path, stat_result=path.stat())  # with the file's ETag
            if request.headers.get("if-none-match") == response.headers["etag"]:
                return Response(status_code=304, headers={"etag": response.headers["etag"]})
            return response

        name = path.relative_to(web).as_posix()
        for route in ("/index.html", "/") if name == "index.html" else (f"/{name}",):
            app.add_route(route, read, methods=["GET", "HEAD"], include_in_schema=False)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        messages = {404: f"There is nothing at {request.url.path:.100}.", 405: "This method is not allowed."}
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

"""The verbs that talk: chat in the terminal, serve for programs and the browser."""

from typing import Annotated

import typer

from nanorun.cli.options import (
    Draft,
    Int8,
    Json,
    Speculate,
    Tools,
    check_speculation,
    check_tools,
    example,
)

app = typer.Typer()


@app.command(epilog=example('nanorun chat -p "What is 17 + 25?"'))
def chat(
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask this, print the answer and end; - reads stdin.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A run's name (default: the newest chat model, else base model).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What a chat model is told before everything.")] = None,
    tools: Tools = "calculator",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is no limit.")] = 50,
    top_p: Annotated[float, typer.Option(help="Only the likeliest, up to this probability in all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was said gets less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same one gives the same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    int8: Int8 = False,
    speculate: Speculate = None,
    draft: Draft = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say how fast each answer was.")] = False,
    as_json: Json = False,
) -> None:
    """Talk to a model: a chat model answers, a base model continues the text.

    In a conversation /help lists the commands. A question given with -p or on stdin is answered alone.
    """
    from nanorun.infer.request import Sampling

    allowed = check_tools(tools)
    sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
    speculation = check_speculation(speculate, draft)

    from nanorun.chat.conversation import Options  # only now: this takes a second
    from nanorun.chat.terminal import chat

    options = Options(model, sampling, max_tokens, system, allowed, int8, speculation, draft)
    chat(options, prompt, as_json=as_json, verbose=verbose)


@app.command(epilog=example("nanorun serve --port 8000"))
def serve(
    model: Annotated[
        str | None, typer.Option(help="A run's name (default: the newest chat model, else base model).")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANORUN_API_KEY", help="Clients must send this key.")
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name that a local server answers to.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Answers at a time on a device (GPU: 64, CPU: 8).")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Answers that may wait; more get 429.")] = 256,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs (default: all).")] = None,
    tools: Tools = "calculator",
    temperature: Annotated[float, typer.Option(help="Where a request does not say.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Where a request does not say; 0 is no limit.")] = 50,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at most.")] = None,
    max_body: Annotated[str, typer.Option(help="Bytes of a request at most, such as 2MB.")] = "2MB",
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    stall: Annotated[float, typer.Option(help="Seconds that a reader may take nothing.")] = 60.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for running answers to end.")] = 30.0,
    int8: Int8 = False,
) -> None:
    """An OpenAI-compatible server, and the page to talk to the model in a browser."""
    from nanorun.data.get import parse_size
    from nanorun.infer.request import Sampling
    from nanorun.serve.options import Limits, Options

    options = Options(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        cors=tuple(cors or ()),
        allow_hosts=tuple(allow_host or ()),
        slots=slots,
        gpus=gpus,
        tools=check_tools(tools),
        int8=int8,
        sampling=Sampling(temperature=temperature, top_k=top_k),
        drain_s=drain,
        limits=Limits(
            body_bytes=parse_size(max_body), tokens=max_tokens, queue=queue, answer_s=timeout, stall_s=stall
        ),
    )

    from nanorun.serve.run import serve  # only now: this takes a second

    serve(options)

"""The verbs that generate text interactively: chat in the terminal, serve for programs and the browser."""

from typing import Annotated

import typer

from nanorun.cli import options as opt

app = typer.Typer()


@app.command(epilog=opt.example('nanorun chat -p "What is 17 + 25?"'))
def chat(
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this prompt and exit; - reads it from stdin.")
    ] = None,
    model: opt.Model = None,
    system: Annotated[str | None, typer.Option(help="The system message of a chat model.")] = None,
    tools: opt.Tools = "calculator",
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is no limit.")] = 50,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: a total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Minimum probability, relative to the top one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, repetition is less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    int8: opt.Int8 = False,
    speculate: opt.Speculate = None,
    draft: opt.Draft = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the speed of each answer.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Chat with a model: a chat model answers, a base model continues the text.

    In a conversation /help lists the commands. A prompt given with -p or on stdin gets one answer. Tool calls are
    shown in brackets; the text of --json leaves them out.
    """
    from nanorun.infer.request import Sampling

    sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p, seed)
    speculation = opt.check_speculation(speculate, draft)

    from nanorun.chat.conversation import ChatOptions  # only now: importing torch takes a second
    from nanorun.chat.terminal import chat

    options = ChatOptions(model, sampling, max_tokens, system, tools, int8, speculation, draft)
    chat(options, prompt, as_json=as_json, verbose=verbose)


@app.command(epilog=opt.example("nanorun serve --port 8000"))
def serve(
    model: opt.Model = None,
    host: Annotated[str, typer.Option(help="Listen here; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANORUN_API_KEY", help="Clients must send this key.")
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call the API.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another host name that a local server accepts.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Concurrent answers per device (GPU: 64, CPU: 8).")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Maximum answers that wait; more get 429.")] = 256,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs (default: all).")] = None,
    tools: opt.Tools = "calculator",
    temperature: Annotated[float, typer.Option(help="Default of requests.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Default of requests; 0 is no limit.")] = 50,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = None,
    max_body: Annotated[str, typer.Option(help="Maximum size of a request, such as 2MB.")] = "2MB",
    timeout: Annotated[float, typer.Option(help="Maximum seconds of an answer.")] = 600.0,
    stall: Annotated[float, typer.Option(help="Timeout of a client that reads nothing.")] = 60.0,
    idle: Annotated[float, typer.Option(help="Timeout of a connection without a request.")] = 20.0,
    connections: Annotated[int, typer.Option(min=1, help="Maximum open connections.")] = 1024,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for answers to finish at shutdown.")] = 30.0,
    int8: opt.Int8 = False,
) -> None:
    """Start an OpenAI-compatible server with a chat page for the browser."""
    from nanorun.data.get import parse_size
    from nanorun.infer.request import Sampling
    from nanorun.serve.options import RequestLimits, ServeOptions

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        cors=tuple(cors or ()),
        allow_hosts=tuple(allow_host or ()),
        slots=slots,
        gpus=gpus,
        tools=tools,
        int8=int8,
        sampling=Sampling(temperature=temperature, top_k=top_k),
        drain_s=drain,
        limits=RequestLimits(
            body_bytes=parse_size(max_body),
            tokens=max_tokens,
            queue=queue,
            connections=connections,
            idle_s=idle,
            answer_s=timeout,
            stall_s=stall,
        ),
    )

    from nanorun.serve.run import serve

    serve(options)

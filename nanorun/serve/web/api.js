// The client of the server's API: its model, and streamed answers. Every error becomes one sentence.

export class ApiError extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

const UNREACHABLE = "The server cannot be reached: check that it is running, then try again.";
const LOST = "The connection was lost before the answer was complete: try again.";

/** The model's card from /v1/models. */
export async function fetchModel(key) {
  const response = await send("v1/models", { headers: headers(key) });
  try {
    const card = (await response.json()).data[0];
    return { id: String(card.id), kind: "chat", suggestions: [], sampling: {}, ...card.nanorun };
  } catch {
    throw new ApiError("This is not a nanorun server: check the address.");
  }
}

/**
 * Yields { tokens }, how many were generated so far, and { content, parts } for each chunk of the answer: its plain
 * text, and its exact parts ("text", or a tool's "python", "output", "guess"); then { finish }; before them
 * { leftOut }, if the oldest messages did not fit. A base model takes `prompt` instead of `messages`.
 */
export async function* answer(request, key, signal) {
  const path = "messages" in request ? "v1/chat/completions" : "v1/completions";
  const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const body = JSON.stringify({ ...request, ...stream });
  const asked = {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body,
    signal,
  };
  const response = await send(path, asked);
  const leftOut = Number(response.headers.get("nanorun-left-out"));
  if (leftOut) yield { leftOut };
  for await (const data of events(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(String(chunk.error.message));
    if (chunk.usage) yield { tokens: chunk.usage.completion_tokens };
    for (const { delta, text, finish_reason: finish } of chunk.choices ?? []) {
      const content = delta?.content ?? text ?? "";
      const parts = delta?.nanorun_parts;
      if (content || parts) yield { content, parts: parts ?? [{ type: "text", text: content }] };
      if (finish) yield { finish };
    }
  }
  throw new ApiError(LOST);
}

async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError(LOST);
  } finally {
    reader.cancel().catch(() => {});
  }
}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    const wrong = error instanceof TypeError && /header|ISO-8859|ByteString/i.test(error.message);
    throw new ApiError(
      wrong ? "The API key has invalid characters: correct it in the settings." : UNREACHABLE,
    );
  }
  if (!response.ok) throw await trouble(response, Boolean(options.headers.authorization));
  return response;
}

async function trouble(response, hadKey) {
  const { status } = response;
  const wait = Number(response.headers.get("retry-after")) || null;
  const error = await response.json().then(
    (body) => body.error,
    () => null,
  );
  if (status === 401) {
    const message = hadKey
      ? "The server does not accept this API key: correct it in the settings."
      : "The server requires an API key: enter it in the settings.";
    return new ApiError(message, status);
  }
  if (status === 429) {
    const when = wait ? ` in ${wait} s` : " in a moment";
    return new ApiError(`The server is at capacity: try again${when}.`, status);
  }
  if (error?.code === "shutting_down") {
    return new ApiError("The server is shutting down: try again when it is back.", status);
  }
  if (error?.code === "engine_failed") {
    return new ApiError("The model has stopped: restart the server, then try again.", status);
  }
  if (error?.code === "context_length_exceeded") {
    return new ApiError("This exceeds the model's context: shorten it, or start a new conversation.", status);
  }
  return new ApiError(error?.message ? String(error.message) : `The server answered with ${status}.`, status);
}

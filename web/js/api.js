// Calls of this server: the secret, errors as errors, server-sent events.

import { t } from "./i18n.js";

const SECRET = "rwkv_batch.secret"; // in the session's storage: gone with the tab
let askForSecret = async () => null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer at all
  }
}

/** `ask` resolves with a password, or null when the person gives up. */
export function setAsk(ask) {
  askForSecret = ask;
}

export function hasSecret() {
  return sessionStorage.getItem(SECRET) !== null;
}

function headersFor(body) {
  const headers = { Accept: "application/json" };
  const secret = sessionStorage.getItem(SECRET);
  if (secret !== null) headers.Authorization = `Bearer ${secret}`;
  if (body !== undefined && !(body instanceof Blob)) headers["Content-Type"] = "application/json";
  return headers;
}

/** fetch, whose failures are told in words. */
async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, t("unreachable"));
  }
}

let asking = null; // one dialog for all calls that wait for it

async function send(path, { body, method, signal } = {}) {
  for (;;) {
    const used = sessionStorage.getItem(SECRET);
    const response = await reach(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: headersFor(body),
      body: body === undefined || body instanceof Blob ? body : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(SECRET) !== used) continue; // another call has asked meanwhile
    asking ??= askForSecret(used !== null).finally(() => (asking = null));
    const secret = await asking;
    if (secret === null) throw new ApiError(401, t("needs_password"));
    sessionStorage.setItem(SECRET, secret);
  }
}

function messageOf(document, fallback) {
  const error = document?.error;
  return (typeof error === "string" ? error : error?.message) ?? fallback;
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let document = null;
  try {
    document = JSON.parse(text);
  } catch {
    // not JSON: the status says it
  }
  const message = messageOf(document, `HTTP ${response.status}`);
  const wait = response.headers.get("Retry-After");
  throw new ApiError(response.status, wait ? `${message} · ${t("retry_after")} ${wait} s` : message);
}

/** The JSON that a call answers. Raises ApiError, also for an answer that failed after it began. */
export async function call(path, options) {
  const document = await (await checked(await send(path, options))).json();
  if (document?.error !== undefined && document.choices === undefined) throw new ApiError(500, messageOf(document, "error"));
  return document;
}

export async function text(path) {
  return (await checked(await send(path))).text();
}

export async function blob(path, options) {
  return (await checked(await send(path, options))).blob();
}

/** The next part of a stream; one that breaks off has ended. */
async function next(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    return { done: true };
  }
}

/**
 * Every JSON event of a stream, as it comes. Raises ApiError for an error event, and when the stream ends without [DONE].
 * Aborting `signal` closes the connection, at which the server ends the request.
 */
export async function* events(path, body, signal) {
  const response = await checked(await send(path, { body, signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await next(reader, signal);
      if (done) throw new ApiError(500, t("cut_off"));
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      const found = [];
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") {
          if (found.length) yield found;
          return;
        }
        const event = JSON.parse(data);
        if (event.error !== undefined) throw new ApiError(500, messageOf(event, "error"));
        found.push(event);
      }
      if (found.length) yield found; // all events of one read together: one reader's turn a read, not one an event
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What a person would type to make the same call. */
export function curl(path, body, stream = false) {
  const header = hasSecret() ? ' -H "Authorization: Bearer $PASSWORD"' : "";
  const url = `${location.origin}${path}`;
  const command = `curl ${stream ? "-N " : ""}${path.includes("?") ? `'${url}'` : url}${header}`;
  if (body === undefined) return command;
  const quoted = JSON.stringify(body, null, 1).replace(/\n\s*/g, " ").replaceAll("'", "'\\''");
  return `${command} -H "Content-Type: application/json" -d '${quoted}'`;
}

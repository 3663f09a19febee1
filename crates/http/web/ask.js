// Requests to the host: who asks shows a token, which the tab keeps until it is closed, or a certificate.

const KEEP = "holdfast-token";

/** What the host refused, by its code. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.error?.message ?? `the host answers ${status}`);
    this.status = status;
    this.code = problem.error?.code ?? "";
  }
}

/** Takes a token out of the address, where `holdfast dashboard` puts it, and out of sight. */
export function takeToken() {
  const found = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (found) {
    setToken(found[1]);
    history.replaceState(null, "", location.pathname);
  }
}

export function setToken(token) {
  sessionStorage.setItem(KEEP, token);
}

export function forgetToken() {
  sessionStorage.removeItem(KEEP);
}

export function hasToken() {
  return sessionStorage.getItem(KEEP) !== null;
}

function headers(more) {
  const token = sessionStorage.getItem(KEEP);
  return token === null ? more : { ...more, Authorization: `Bearer ${token}` };
}

/**
 * @param {string} method
 * @param {string} path with its names encoded: see `path`
 * @param {object} [body]
 * @returns {Promise<any>} the resource; `null` where there is none
 */
export async function ask(method, path, body) {
  const more = {};
  if (method !== "GET") more["Idempotency-Key"] = crypto.randomUUID();
  if (body !== undefined) more["Content-Type"] = "application/json";
  const init = { method, headers: headers(more), cache: "no-store" };
  if (body !== undefined) init.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, init);
  } catch {
    throw new Refused(0, { error: { message: "the host can't be reached" } });
  }
  if (response.status === 204) return null;
  const told = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, told);
  return told;
}

/** A path of parts, each of which may have anything in it. */
export function path(...parts) {
  return "/v1/" + parts.map(encodeURIComponent).join("/");
}

/**
 * Server-sent events, by `fetch`, for an EventSource shows no token. Ends when the stream does.
 * @param {(event: string, data: any) => void} heard
 */
export async function listen(heard) {
  const response = await fetch("/v1/events", { headers: headers({ Accept: "text/event-stream" }), cache: "no-store" });
  if (!response.ok) throw new Refused(response.status, await response.json().catch(() => ({})));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const field = (name) =>
        block
          .split("\n")
          .filter((line) => line.startsWith(`${name}:`))
          .map((line) => line.slice(name.length + 1).trimStart())
          .join("\n");
      if (field("data")) heard(field("event"), JSON.parse(field("data")));
    }
  }
}

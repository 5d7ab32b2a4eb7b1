// Sends requests to this server only. The token is kept in this tab's session storage.

const TOKEN = "embedserve.token";
const RESPONSE_MS_MAX = 10000;

let token = kept();

function kept() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return ""; // the browser denies access to session storage
  }
}

export function useToken(given) {
  token = given.replace(/[^ -ÿ]/g, "?"); // no header has other characters; the server rejects this token
  try {
    if (token) sessionStorage.setItem(TOKEN, token);
    else sessionStorage.removeItem(TOKEN);
  } catch {
    // The token stays in memory only.
  }
}

export function hasToken() {
  return token !== "";
}

/** An error response; status 0: there was no response. */
export class RequestError extends Error {
  constructor(status, message, field = "") {
    super(message);
    this.status = status;
    this.field = field;
  }

  /** Whether another token may be accepted. */
  get isDenied() {
    return this.status === 401 || this.status === 403;
  }
}

/** Returns the response text of a route. A body is posted as JSON. */
export async function askText(path, body = null) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body !== null) headers["Content-Type"] = "application/json";
  let response, text;
  try {
    response = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body,
      cache: "no-store",
      redirect: "error",
      signal: AbortSignal.timeout(RESPONSE_MS_MAX),
    });
    text = await response.text();
  } catch (error) {
    const why = error.name === "TimeoutError" ? "no answer in 10 s" : "the server cannot be reached";
    throw new RequestError(0, why);
  }
  if (!response.ok) throw errorOf(response.status, text);
  return text;
}

export async function ask(path, body = null) {
  return JSON.parse(await askText(path, body));
}

/** Encodes a model's name for a URL path. */
export function inPath(name) {
  return encodeURIComponent(name).replaceAll("%40", "@");
}

function errorOf(status, text) {
  try {
    const { code, message, field } = JSON.parse(text).error;
    return new RequestError(status, `${code}: ${message}`, field);
  } catch {
    return new RequestError(status, `status ${status}`);
  }
}

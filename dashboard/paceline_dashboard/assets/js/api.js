// All requests to the server: JSON under /api/v1, errors as RFC 9457.
const BASE = new URL("../../", import.meta.url); // assets/js/ lies two levels below the dashboard's root
const LONGEST_MS = 20_000;

/** @param {string} path */
export function url(path) {
  return new URL(`api/v1/${path}`, BASE);
}

export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {{field: string, message: string}[]} fields
   */
  constructor(status, message, fields = []) {
    super(message);
    this.status = status; // 0: no answer, or an incomplete one
    this.fields = fields; // [{field, message}]: problems of the request's fields
  }
}

/**
 * The JSON answer. Throws ApiError with the server's message, or with status 0 if the server is away.
 * @param {string} path
 * @param {Record<string, any>} params
 * @param {number} longestMs
 * @returns {Promise<any>}
 */
export async function get(path, params = {}, longestMs = LONGEST_MS) {
  const target = url(path);
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") target.searchParams.set(name, value);
  }
  return request(target, {}, longestMs);
}

/**
 * @param {string} path
 * @param {object} body
 */
export async function post(path, body) {
  return send("POST", path, body);
}

/**
 * @param {string} path
 * @param {object} body
 */
export async function put(path, body) {
  return send("PUT", path, body);
}

/**
 * @param {string} method
 * @param {string} path
 * @param {object} body
 */
function send(method, path, body) {
  return request(url(path), {
    method,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/**
 * @param {URL} target
 * @param {RequestInit} options
 * @param {number} longestMs
 */
async function request(target, options, longestMs = LONGEST_MS) {
  let response;
  try {
    response = await fetch(target, { ...options, signal: AbortSignal.timeout(longestMs) });
  } catch (error) {
    throw new ApiError(0, `The server does not answer (${error.message}).`);
  }
  if (response.status === 401) {
    location.assign(new URL("login", BASE).href); // the session ended: sign in again
  }
  if (!response.ok) {
    const problem = await problemOf(response);
    throw new ApiError(response.status, problem.detail, problem.errors ?? []);
  }
  try {
    return await response.json();
  } catch (error) {
    throw new ApiError(0, `The server's answer cannot be read (${error.message}).`);
  }
}

/**
 * The problem document of an error; without a document, the status line.
 * @param {Response} response
 */
async function problemOf(response) {
  const type = response.headers.get("Content-Type") || "";
  const problem = type.includes("json") ? await response.json().catch(() => ({})) : {};
  if (typeof problem.detail === "string") return problem;
  return { detail: problem.title || `${response.status} ${response.statusText}` };
}

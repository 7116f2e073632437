// All requests to the server: JSON under /api/v1, errors as RFC 9457.
export const BASE = new URL("../../", import.meta.url); // assets/js/ lies two levels below the dashboard's root
const LONGEST_MS = 20_000;

/** @param {string} path */
export function url(path) {
  return new URL(`api/v1/${path}`, BASE);
}

export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {Record<string, any>} problem
   */
  constructor(status, message, problem = {}) {
    super(message);
    this.status = status; // 0: no answer, or an incomplete one
    this.problem = problem; // the problem document
    /** @type {{field: string, message: string}[]} */
    this.fields = problem.errors ?? []; // problems of the request's fields
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
 * Asks for a change of a run that still has this revision; ApiError with status 412 if it has another.
 * @param {string} method
 * @param {string} path
 * @param {object} body
 * @param {number} revision that the operator has seen
 */
export async function change(method, path, body, revision) {
  return request(url(path), {
    method,
    headers: { "Content-Type": "application/json", "If-Match": `"${revision}"` },
    body: JSON.stringify(body),
  });
}

/**
 * Asks for a change of what has no revision.
 * @param {string} method
 * @param {string} path
 * @param {object} [body]
 */
export async function send(method, path, body) {
  const options = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return request(url(path), { method, ...options });
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
    throw new ApiError(response.status, problem.detail, problem);
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

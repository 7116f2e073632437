// The only way to the server: JSON under /api/v1, errors as RFC 9457.
const BASE = new URL("../../", import.meta.url); // assets/js/ lies two levels below the dashboard's root

export function url(path) {
  return new URL(`api/v1/${path}`, BASE);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer at all, or half of one
  }
}

/** The JSON answer; throws ApiError with the server's own words, or with status 0 when it is away. */
export async function get(path, params = {}) {
  const target = url(path);
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") target.searchParams.set(name, value);
  }
  return request(target, {});
}

export async function post(path, body) {
  return request(url(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function request(target, options) {
  let response;
  try {
    response = await fetch(target, { ...options, signal: AbortSignal.timeout(20_000) });
  } catch (error) {
    throw new ApiError(0, `The server does not answer (${error.message}).`);
  }
  if (response.status === 401) {
    location.assign(new URL("login", BASE)); // the session ended: sign in again
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  try {
    return await response.json();
  } catch (error) {
    throw new ApiError(0, `The server's answer cannot be read (${error.message}).`);
  }
}

/** What a problem document says, with the fields at fault; the status line where there is none. */
async function reason(response) {
  const type = response.headers.get("Content-Type") || "";
  if (!type.includes("json")) return `${response.status} ${response.statusText}`;
  const problem = await response.json().catch(() => ({}));
  return typeof problem.detail === "string" ? problem.detail : problem.title || `${response.status} ${response.statusText}`;
}

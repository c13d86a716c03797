// The gateway of a test, whose URL is the first argument of a script, and the record of a script's requests.

export const baseURL = `${process.argv[2]}/v1`;
export const requests = [];

/** Send a request like `fetch` does, and record its body and the fields that the gateway ignored. */
export async function recordingFetch(url, options) {
  const response = await fetch(url, options);
  requests.push({
    path: new URL(url).pathname,
    body: JSON.parse(options.body),
    status: response.status,
    ignored: (response.headers.get("x-mizzen-ignored") ?? "").split(", "),
  });
  return response;
}

/** Print the results of a script, and its requests, for the test that started it. */
export function report(results) {
  console.log(JSON.stringify({ ...results, requests }));
}

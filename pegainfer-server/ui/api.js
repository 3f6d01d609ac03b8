// The server's public API. Addresses are relative, so that the web UI also works behind a proxy that adds a prefix.

/** A refusal or a failure, as a message for the user, with the HTTP status if the server has responded. */
export class ApiError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** Streams a chat completion: yields its chunks as objects. Aborting `signal` cancels the request on the server. */
export async function* chat(body, key, signal) {
  const response = await request('v1/chat/completions', key, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, include_metrics: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(sentence(chunk.error.message));
    yield chunk;
  }
  throw new ApiError('The connection was closed before the response was complete.');
}

/** Cards of the served models and adapters: `id`, `max_model_len`, ... */
export async function models(key) {
  const response = await request('v1/models', key);
  return (await response.json()).data;
}

/** Prometheus samples by name, without labels; those of several engines are added up. `engines` is the number of engines. */
export async function metrics(key) {
  const response = await request('metrics', key);
  const samples = new Map();
  for (const line of (await response.text()).split('\n')) {
    const sample = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (!sample) continue;
    samples.set(sample[1], (samples.get(sample[1]) ?? 0) + Number(sample[2]));
    if (sample[1] === 'vllm:kv_cache_usage_perc') samples.set('engines', (samples.get('engines') ?? 0) + 1);
  }
  return samples;
}

/** The newest steps of the engine, oldest first. */
export async function steps(key, last) {
  const response = await request(`debug/steps?last=${last}`, key);
  const lines = (await response.text()).split('\n');
  return lines.filter((line) => line).map((line) => JSON.parse(line));
}

/** Seconds of the newest steps by op, as the server's ledger divides them. */
export async function opTimes(key, last) {
  const response = await request(`debug/steps?last=${last}&format=ops`, key);
  return response.json();
}

async function request(path, key, options = {}) {
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError('The server cannot be reached.');
  }
  if (!response.ok) throw new ApiError(await refusal(response), response.status);
  return response;
}

/** The server's error message, if the response has one. */
async function refusal(response) {
  if (response.status === 401) return 'This server needs an API key.';
  const text = await response.text();
  let message = '';
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? '';
  } catch {
    // A proxy's error document does not help the user.
  }
  return message ? sentence(message) : `The server responded with ${response.status} ${response.statusText}`.trim();
}

/** An error message that begins with a word as a sentence. Names such as `max_tokens` stay. */
const sentence = (text) => text.replace(/^[a-z]+(?=[ ,:])/, (word) => word[0].toUpperCase() + word.slice(1));

/** Data of server-sent events. An event ends with an empty line and may arrive in any number of parts. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ApiError('The connection to the server was lost.');
    }
    if (part.done) return;
    const blocks = (buffered + part.value).split(/\r?\n\r?\n/);
    buffered = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith('data:'));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, '')).join('\n');
    }
  }
}

// The conversation: turns of a prompt and a response, and the running request.

import { ApiError, chat } from './api.js';
import { contentOf } from './images.js';
import { TurnView } from './message.js';
import { ReasoningSplitter } from './segments.js';
import { count, milliseconds } from './words.js';

/** A turn while its response is streamed: splits the chunks, and measures the time to the first. */
class Turn {
  content = '';
  reasoning = '';
  tokens = 0;
  finish = null;
  usage = null;
  /** The server's timings, which come with the last chunk. */
  metrics = null;
  #splitter = new ReasoningSplitter(this.#sink());
  #started = performance.now();
  #first = null;

  constructor(message, view) {
    this.message = message;
    this.view = view;
  }

  add({ choices, usage, metrics }) {
    this.usage = usage ?? this.usage;
    this.metrics = metrics ?? this.metrics;
    const choice = choices[0];
    // The first chunk carries the role and no token.
    if (!choice || choice.delta.role) return;
    this.#first ??= performance.now();
    this.tokens += 1;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content, reasoning } = choice.delta;
    const tokens = choice.logprobs?.content;
    const reasoned = reasoning_content ?? reasoning;
    if (reasoned) this.#sink().reason([{ text: reasoned, tokens }]);
    else this.#splitter.push({ text: content ?? '', tokens });
  }

  end() {
    this.#splitter.end();
  }

  /** TTFT as the user has seen it, and TPOT as the engine has measured it, in milliseconds: a network joins tokens. */
  get times() {
    const ttft = this.#first === null ? null : this.#first - this.#started;
    return { ttft, tpot: this.metrics?.mean_itl_ms ?? null };
  }

  /** What is kept of the turn. */
  get kept() {
    return { ...this.message, content: this.content.trim(), reasoning: this.reasoning, times: this.times };
  }

  #sink() {
    const text = (segments) => segments.map((segment) => segment.text).join('');
    return {
      reason: (segments) => {
        this.reasoning += text(segments);
        this.view.reason(segments);
      },
      write: (segments) => {
        this.content += text(segments);
        this.view.write(segments);
      },
      reclassify: () => {
        this.reasoning += this.content;
        this.content = '';
        this.view.reclassify();
      },
    };
  }
}

/** Sends messages, `{prompt, images}`, to the model and shows the conversation in `log`. */
export class Chat {
  #log;
  #settings;
  #key;
  #resend;
  #changed;
  /** Views of all turns, and what is kept of each; null for a turn that failed without a response. */
  #turns = [];
  #running = null;
  /** The turn whose response is streamed. */
  #turn = null;

  /**
   * `resend(message, view)` is called when the user wants `message` sent instead of the turn of `view` and those after it,
   * `changed()` when a response has grown.
   */
  constructor(log, settings, key, resend, changed) {
    this.#log = log;
    this.#settings = settings;
    this.#key = key;
    this.#resend = resend;
    this.#changed = changed;
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** The turns with a response, `[{prompt, images, content, reasoning, times}]`. Older turns have no `images`. */
  get turns() {
    return this.#turns.flatMap(({ kept }) => kept ?? []);
  }

  /** The turns, and what has come of the running one. */
  get turnsSoFar() {
    return this.#turn ? [...this.turns, { ...this.#turn.kept, note: 'interrupted' }] : this.turns;
  }

  /** Shows these turns instead of the conversation. */
  load(turns) {
    this.clear();
    for (const turn of turns) this.#show(turn);
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#running = null;
    this.#turn = null;
    this.#turns = [];
    this.#log.replaceChildren();
  }

  /**
   * Sends `message`, instead of the turn of `view` and those after it if there is one; they come back if the request fails or
   * is stopped before its first token. Resolves to `{times, outcome, status}`: the latencies, `done`, `stopped`, `failed`, or
   * `cleared` if a new chat was started meanwhile, and the HTTP status of a refusal.
   */
  async send(model, message, view) {
    const replaced = this.#replace(view);
    const body = { ...(model && { model }), messages: this.#messages(message), ...this.#settings.request };
    const turn = new Turn(message, this.#open(message));
    const running = new AbortController();
    this.#running = running;
    this.#turn = turn;
    const { message: error, status } = await this.#receive(turn, body, running.signal);
    if (this.#running !== running) return { times: turn.times, outcome: 'cleared' };
    this.#running = null;
    this.#turn = null;
    const stopped = running.signal.aborted;
    const kept = { ...turn.kept, error, note: note(turn, stopped) };
    turn.view.end(kept);
    const isUseless = error || (stopped && !turn.tokens);
    if (replaced.length && isUseless) this.#restore(replaced, turn.view, error);
    else this.#turns.push({ view: turn.view, kept: kept.content || kept.reasoning || !error ? kept : null });
    return { times: turn.times, outcome: error ? 'failed' : stopped ? 'stopped' : 'done', status };
  }

  /**
   * Takes the turn of `view` and those after it out of the conversation, and returns them. Failed turns without a response
   * are removed for good.
   */
  #replace(view) {
    for (const turn of this.#turns.filter(({ kept }) => kept === null)) turn.view.remove();
    this.#turns = this.#turns.filter(({ kept }) => kept !== null);
    const from = this.#turns.findIndex((turn) => turn.view === view);
    const replaced = from < 0 ? [] : this.#turns.splice(from);
    for (const turn of replaced) turn.view.remove();
    return replaced;
  }

  /** Puts the turns back that the turn of `failed` should have replaced, with the error message if there is one. */
  #restore(replaced, failed, error) {
    failed.remove();
    for (const turn of replaced) turn.view.restore();
    if (error) replaced[0].view.fail(error);
    this.#turns.push(...replaced);
  }

  #open(message) {
    const view = new TurnView(this.#log, message, (changed) => this.#resend(changed, view));
    return view;
  }

  /** Reads the response to its end; returns the error if it failed, otherwise an empty object. */
  async #receive(turn, body, signal) {
    turn.view.busy = true;
    try {
      for await (const chunk of chat(body, this.#key.value, signal)) {
        turn.add(chunk);
        if (!signal.aborted) this.#changed();
      }
      return {};
    } catch (error) {
      if (signal.aborted) return {};
      if (!(error instanceof ApiError)) console.error(error);
      return error;
    } finally {
      turn.end();
    }
  }

  /** Messages without earlier reasoning, as the chat templates of reasoning models expect. */
  #messages(message) {
    const system = this.#settings.system;
    const complete = this.turns.filter(({ content }) => content);
    return [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...complete.flatMap((turn) => [
        { role: 'user', content: contentOf(turn) },
        { role: 'assistant', content: turn.content },
      ]),
      { role: 'user', content: contentOf(message) },
    ];
  }

  #show(turn) {
    const view = this.#open({ prompt: turn.prompt, images: turn.images ?? [] });
    if (turn.reasoning) view.reason([{ text: turn.reasoning }]);
    view.write([{ text: turn.content }]);
    view.end(turn);
    this.#turns.push({ view, kept: turn });
  }
}

/** Summary of a response, in one line. */
function note({ times: { ttft, tpot }, tokens, finish, usage }, stopped) {
  const parts = [];
  if (stopped) parts.push('stopped');
  if (finish === 'length') parts.push('cut off at max_tokens');
  const prompt = usage && count(usage.prompt_tokens, 'prompt token');
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (prompt) parts.push(cached ? `${prompt} (${cached} cached)` : prompt);
  if (tokens) parts.push(count(usage?.completion_tokens ?? tokens, 'token'));
  if (ttft !== null) parts.push(`TTFT ${milliseconds(ttft)}`);
  if (tpot !== null) parts.push(`TPOT ${milliseconds(tpot)}`);
  return parts.join(' · ');
}

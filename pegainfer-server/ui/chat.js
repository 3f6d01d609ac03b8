// The conversation: turns of a prompt and an answer, and the request that is running.

import { ApiError, chat } from './api.js';
import { recall, remember } from './dom.js';
import { TurnView } from './message.js';
import { ThinkSplitter } from './pieces.js';
import { count, milliseconds } from './words.js';

const STORE = 'pegainfer.turns';

/** A turn while it is answered: takes chunks apart and measures the time between them. */
class Turn {
  answer = '';
  thoughts = '';
  tokens = 0;
  finish = null;
  usage = null;
  #splitter = new ThinkSplitter(this.#sink());
  #started = performance.now();
  #first = null;
  #last = null;

  constructor(prompt, view) {
    this.prompt = prompt;
    this.view = view;
  }

  add({ choices, usage }) {
    this.usage = usage ?? this.usage;
    const choice = choices[0];
    // The chunk that opens the answer carries the role and no token.
    if (!choice || choice.delta.role) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.tokens += 1;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content, reasoning } = choice.delta;
    const tokens = choice.logprobs?.content;
    const thought = reasoning_content ?? reasoning;
    if (thought) this.#sink().think([{ text: thought, tokens }]);
    else this.#splitter.push({ text: content ?? '', tokens });
  }

  end() {
    this.#splitter.end();
  }

  /** Milliseconds to the first token, and for each one after it. */
  get times() {
    const ttft = this.#first === null ? null : this.#first - this.#started;
    const tpot = this.tokens > 1 ? (this.#last - this.#first) / (this.tokens - 1) : null;
    return { ttft, tpot };
  }

  #sink() {
    const text = (pieces) => pieces.map((piece) => piece.text).join('');
    return {
      think: (pieces) => {
        this.thoughts += text(pieces);
        this.view.think(pieces);
      },
      answer: (pieces) => {
        this.answer += text(pieces);
        this.view.answer(pieces);
      },
      rethink: () => {
        this.thoughts += this.answer;
        this.answer = '';
        this.view.rethink();
      },
    };
  }
}

/** Talks to the model and shows it in `log`. */
export class Chat {
  #log;
  #settings;
  #turns = [];
  #running = null;
  #failed = null;

  constructor(log, settings) {
    this.#log = log;
    this.#settings = settings;
    this.#turns = recall(STORE, []);
    for (const turn of this.#turns) this.#show(turn);
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Times of the answers that are shown. */
  get times() {
    return this.#turns.map(({ times }) => times);
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#running = null;
    this.#turns = [];
    this.#failed = null;
    this.#log.replaceChildren();
    remember(STORE, this.#turns);
  }

  /**
   * Answers `prompt`. Gives `{times, outcome}`: what was measured, and how it ended: `done`, `stopped`, `failed`, or
   * `cleared` by a new chat.
   */
  async send(model, prompt) {
    // What could not be answered is not part of the conversation.
    this.#failed?.remove();
    this.#failed = null;
    const body = { ...(model && { model }), messages: this.#messages(prompt), ...this.#settings.request };
    const turn = new Turn(prompt, new TurnView(this.#log, prompt));
    const running = new AbortController();
    this.#running = running;
    const error = await this.#receive(turn, body, running.signal);
    if (this.#running !== running) return { times: turn.times, outcome: 'cleared' };
    this.#running = null;
    const stopped = running.signal.aborted;
    const kept = { prompt, answer: turn.answer.trim(), thoughts: turn.thoughts, times: turn.times, error };
    kept.note = note(turn, stopped);
    turn.view.end(kept);
    if (kept.answer || kept.thoughts || !error) this.#keep(kept);
    else this.#failed = turn.view;
    return { times: turn.times, outcome: error ? 'failed' : stopped ? 'stopped' : 'done' };
  }

  /** Reads the answer to its end; gives what went wrong, if anything did. */
  async #receive(turn, body, signal) {
    turn.view.busy = true;
    try {
      for await (const chunk of chat(body, this.#settings.key, signal)) turn.add(chunk);
      return undefined;
    } catch (error) {
      if (signal.aborted) return undefined;
      if (!(error instanceof ApiError)) console.error(error);
      return error.message;
    } finally {
      turn.end();
    }
  }

  /** Answers without their thoughts, as the templates of thinking models want them. */
  #messages(prompt) {
    const system = this.#settings.system;
    const answered = this.#turns.filter(({ answer }) => answer);
    return [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...answered.flatMap((turn) => [
        { role: 'user', content: turn.prompt },
        { role: 'assistant', content: turn.answer },
      ]),
      { role: 'user', content: prompt },
    ];
  }

  #keep(turn) {
    this.#turns.push(turn);
    remember(STORE, this.#turns);
  }

  #show(turn) {
    const view = new TurnView(this.#log, turn.prompt);
    if (turn.thoughts) view.think([{ text: turn.thoughts }]);
    view.answer([{ text: turn.answer }]);
    view.end(turn);
  }
}

/** How an answer went, in one line. */
function note({ times: { ttft, tpot }, tokens, finish, usage }, stopped) {
  const parts = [];
  if (stopped) parts.push('stopped');
  if (finish === 'length') parts.push('cut at the limit of tokens');
  const prompt = usage && count(usage.prompt_tokens, 'prompt token');
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (prompt) parts.push(cached ? `${prompt} (${cached} cached)` : prompt);
  if (tokens) parts.push(count(usage?.completion_tokens ?? tokens, 'token'));
  if (ttft !== null) parts.push(`TTFT ${milliseconds(ttft)}`);
  if (tpot !== null) parts.push(`TPOT ${milliseconds(tpot)}`);
  return parts.join(' · ');
}

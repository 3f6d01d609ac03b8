// Tokens with their probabilities: a tint on each, and a card with the alternatives on hover, focus or touch.

import { element } from './dom.js';

/** Entries of `logprobs` for the tokens of each span. */
const details = new WeakMap();

/** A span of one token, or of several that only together form text. */
export function tokenSpan(text, tokens) {
  const span = element('span', { className: text ? 'token' : 'token end', tabIndex: -1 }, text);
  const sure = Math.exp(tokens.reduce((sum, { logprob }) => sum + logprob, 0));
  span.style.setProperty('--doubt', (1 - sure).toFixed(3));
  details.set(span, tokens);
  return span;
}

/** The card with the alternatives of a token in `log`. */
export class TokenCard {
  #card;
  #log;
  #span = null;

  constructor(card, log) {
    this.#card = card;
    this.#log = log;
    const spanOf = (event) => event.target.closest?.('.token');
    for (const enter of ['pointerover', 'focusin']) {
      log.addEventListener(enter, (event) => this.#show(spanOf(event)));
    }
    for (const leave of ['pointerleave', 'focusout', 'scroll']) log.addEventListener(leave, () => this.hide());
    log.addEventListener('keydown', (event) => this.#move(event));
  }

  get isOpen() {
    return !this.#card.hidden;
  }

  hide() {
    this.#card.hidden = true;
    this.#span?.removeAttribute('aria-describedby');
    this.#span = null;
  }

  #show(span) {
    this.hide();
    if (!span) return;
    this.#span = span;
    span.setAttribute('aria-describedby', this.#card.id);
    this.#card.replaceChildren(...details.get(span).map(table));
    this.#card.hidden = false;
    this.#place(span);
  }

  /** Places the card above the token if it fits, else below; never beyond the edges of the window. */
  #place(span) {
    const token = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const card = this.#card.getBoundingClientRect();
    const left = Math.min(token.left, window.innerWidth - card.width - 8);
    const above = token.top - card.height - 6;
    this.#card.style.left = `${Math.max(8, left)}px`;
    this.#card.style.top = `${above >= 8 ? above : token.bottom + 6}px`;
  }

  /** Moves the focus between tokens with the arrow keys; Tab would need a stop for every token. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const spans = [...this.#log.querySelectorAll('.token')];
    const at = spans.indexOf(document.activeElement);
    // From the conversation itself, the focus moves to the last response.
    const next = at >= 0 ? spans[at + step] : document.activeElement === this.#log && firstOfLast(spans);
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

function firstOfLast(spans) {
  const turn = spans.at(-1)?.closest('.turn');
  return spans.find((span) => turn.contains(span));
}

/** Table of the sampled token and its most likely alternatives. */
function table({ token, logprob, top_logprobs }) {
  const chosen = { token, logprob };
  const isChosen = (other) => other.token === token && other.logprob === logprob;
  const listed = top_logprobs.some(isChosen) ? top_logprobs : [...top_logprobs, chosen];
  const rows = listed.map((other) => row(other, isChosen(other)));
  const caption = element('caption', {}, `${visible(token)} ${percent(logprob)}`);
  return element('table', {}, caption, element('tbody', {}, ...rows));
}

function row({ token, logprob }, isChosen) {
  const bar = element('span', { className: 'bar' });
  bar.style.width = `${Math.exp(logprob) * 100}%`;
  return element(
    'tr',
    { className: isChosen ? 'chosen' : '' },
    element('th', { scope: 'row' }, visible(token)),
    element('td', {}, percent(logprob)),
    element('td', { className: 'track' }, bar),
  );
}

/** A token with visible white space. */
function visible(token) {
  return token.replaceAll(' ', '␣').replaceAll('\n', '↵').replaceAll('\t', '⇥') || '∅';
}

function percent(logprob) {
  const percentage = Math.exp(logprob) * 100;
  return percentage > 0 && percentage < 0.1 ? '<0.1 %' : `${percentage.toFixed(1)} %`;
}

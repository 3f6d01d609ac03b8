// One turn on the screen: what the user wrote, what the model thought, what it answered, and how that went.

import { element } from './dom.js';
import { FenceSplitter } from './pieces.js';
import { tokenSpan } from './tokens.js';

/** A turn in the conversation `log`. */
export class TurnView {
  #root;
  #thoughts = null;
  #answer;

  constructor(log, prompt) {
    const speaker = element('span', { className: 'unseen' }, 'You: ');
    const question = element('div', { className: 'question' }, speaker, prompt);
    const body = element('div', { className: 'answer' });
    this.#answer = new Body(body);
    this.#root = element('article', { className: 'turn' }, question, body);
    log.append(this.#root);
  }

  /** While it is true, screen readers wait, and a caret shows where text will come. */
  set busy(busy) {
    this.#root.setAttribute('aria-busy', busy);
    if (this.#thoughts) this.#thoughts.summary.textContent = busy ? 'Thinking …' : 'Thoughts';
  }

  think(pieces) {
    if (!this.#thoughts && !pieces.some(({ text }) => text.trim())) return;
    this.#thoughts ??= this.#openThoughts();
    for (const piece of pieces) this.#thoughts.body.push(piece);
  }

  answer(pieces) {
    for (const piece of pieces) this.#answer.push(piece);
  }

  /** What was shown as the answer turns out to be thoughts. */
  rethink() {
    const shown = this.#answer;
    shown.end();
    this.#thoughts ??= this.#openThoughts();
    this.#thoughts.body.adopt(shown);
    const body = element('div', { className: 'answer' });
    this.#answer = new Body(body);
    this.#root.append(body);
  }

  /** Nothing more will come. `note`: figures; `error`: what went wrong. */
  end({ note, error }) {
    this.#thoughts?.body.end();
    this.#answer.end();
    this.busy = false;
    if (error) this.#root.append(element('p', { className: 'error', role: 'alert' }, error));
    if (note) this.#root.append(element('p', { className: 'figures' }, note));
  }

  remove() {
    this.#root.remove();
  }

  #openThoughts() {
    const summary = element('summary', {}, 'Thinking …');
    const text = element('div');
    this.#root.querySelector('.answer').before(element('details', { className: 'thoughts' }, summary, text));
    return { summary, body: new Body(text) };
  }
}

/** Text, code and tokens, appended as they come: the cost of a piece does not grow with the answer. */
class Body {
  #root;
  #fences = new FenceSplitter(this);
  #block = null;
  /** Tokens that have no text of their own yet, such as the first part of a character. */
  #silent = [];

  constructor(root) {
    this.#root = root;
  }

  push(piece) {
    this.#fences.push(piece);
  }

  end() {
    this.#fences.end();
    if (this.#silent.length && this.#block) this.#block.append(tokenSpan('', this.#silent));
    this.#silent = [];
  }

  /** Takes over what another body shows. */
  adopt(other) {
    this.#root.append(...other.#root.childNodes);
    other.#root.remove();
  }

  write(pieces) {
    for (const { text, tokens } of pieces) this.#append(text, tokens);
  }

  openCode() {
    this.#block = element('code');
    this.#root.append(element('pre', { tabIndex: 0 }, this.#block));
  }

  closeCode() {
    this.#block = null;
  }

  #append(text, tokens) {
    // An answer after thoughts begins with empty lines.
    const shown = this.#root.hasChildNodes() ? text : text.trimStart();
    if (tokens) this.#silent.push(...tokens);
    if (!shown) return;
    if (!this.#block) {
      this.#block = element('p');
      this.#root.append(this.#block);
    }
    if (this.#silent.length) {
      this.#block.append(tokenSpan(shown, this.#silent));
      this.#silent = [];
    } else if (this.#block.lastChild?.nodeType === Node.TEXT_NODE) {
      this.#block.lastChild.appendData(shown);
    } else {
      this.#block.append(shown);
    }
  }
}

// One turn on the screen: the prompt, the reasoning, the response, and its summary.

import { element } from './dom.js';
import { FenceSplitter } from './segments.js';
import { tokenSpan } from './tokens.js';

/** A turn in the conversation `log`. */
export class TurnView {
  #root;
  #reasoning = null;
  #content;

  constructor(log, prompt) {
    const speaker = element('span', { className: 'unseen' }, 'You: ');
    const question = element('div', { className: 'question' }, speaker, prompt);
    const body = element('div', { className: 'response' });
    this.#content = new Body(body);
    this.#root = element('article', { className: 'turn' }, question, body);
    log.append(this.#root);
  }

  /** Set while the response is streamed: screen readers wait, and a caret marks the end. */
  set busy(busy) {
    this.#root.setAttribute('aria-busy', busy);
    if (this.#reasoning) this.#reasoning.summary.textContent = busy ? 'Reasoning …' : 'Reasoning';
  }

  reason(segments) {
    if (!this.#reasoning && !segments.some(({ text }) => text.trim())) return;
    this.#reasoning ??= this.#openReasoning();
    for (const segment of segments) this.#reasoning.body.push(segment);
  }

  write(segments) {
    for (const segment of segments) this.#content.push(segment);
  }

  /** Moves everything shown as the response to the reasoning. */
  reclassify() {
    const shown = this.#content;
    shown.end();
    this.#reasoning ??= this.#openReasoning();
    this.#reasoning.body.adopt(shown);
    const body = element('div', { className: 'response' });
    this.#content = new Body(body);
    this.#root.append(body);
  }

  /** Ends the turn. `note`: its summary; `error`: the error message, if it failed. */
  end({ note, error }) {
    this.#reasoning?.body.end();
    this.#content.end();
    this.busy = false;
    if (error) this.#root.append(element('p', { className: 'error', role: 'alert' }, error));
    if (note) this.#root.append(element('p', { className: 'figures' }, note));
  }

  remove() {
    this.#root.remove();
  }

  #openReasoning() {
    const summary = element('summary', {}, 'Reasoning …');
    const text = element('div');
    this.#root.querySelector('.response').before(element('details', { className: 'reasoning' }, summary, text));
    return { summary, body: new Body(text) };
  }
}

/** Text, code and tokens, appended as they arrive: the cost of a segment does not grow with the response. */
class Body {
  #root;
  #fences = new FenceSplitter(this);
  #block = null;
  /** Tokens without text of their own so far, such as the first part of a character. */
  #silent = [];

  constructor(root) {
    this.#root = root;
  }

  push(segment) {
    this.#fences.push(segment);
  }

  end() {
    this.#fences.end();
    if (this.#silent.length && this.#block) this.#block.append(tokenSpan('', this.#silent));
    this.#silent = [];
  }

  /** Moves the contents of another body here. */
  adopt(other) {
    this.#root.append(...other.#root.childNodes);
    other.#root.remove();
  }

  write(segments) {
    for (const { text, tokens } of segments) this.#append(text, tokens);
  }

  openCode() {
    this.#block = element('code');
    this.#root.append(element('pre', { tabIndex: 0 }, this.#block));
  }

  closeCode() {
    this.#block = null;
  }

  #append(text, tokens) {
    // Text after reasoning begins with empty lines.
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

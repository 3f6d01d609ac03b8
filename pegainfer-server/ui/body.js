// The text of a response or of its reasoning: as Markdown, or as tokens with their probabilities.

import { element } from './dom.js';
import { MarkdownView } from './markdown.js';
import { tokenSpan } from './tokens.js';

/** Text that grows in `root`. It is shown as tokens first if it has probabilities, since the user asked for them. */
export class Body {
  #root;
  #segments = [];
  #view = null;

  constructor(root) {
    this.#root = root;
  }

  push(segment) {
    this.#segments.push(segment);
    this.#view ??= segment.tokens ? new TokenView(this.#root) : new MarkdownView(this.#root);
    this.#view.push(segment);
  }

  end() {
    this.#view?.end();
  }

  get hasTokens() {
    return this.#segments.some(({ tokens }) => tokens);
  }

  /** Shows the complete text as tokens, or as Markdown. */
  show(asTokens) {
    this.#root.replaceChildren();
    this.#view = asTokens ? new TokenView(this.#root) : new MarkdownView(this.#root);
    for (const segment of this.#segments) this.#view.push(segment);
    this.#view.end();
  }

  /** Moves the text of another body here, and removes that one. */
  adopt(other) {
    other.end();
    for (const segment of other.#segments) this.push(segment);
    other.#root.remove();
  }
}

/** Tokens as spans, appended as they arrive. */
class TokenView {
  #text = element('p', { className: 'verbatim' });
  /** Tokens without text of their own so far, such as the first part of a character. */
  #silent = [];

  constructor(root) {
    root.append(this.#text);
  }

  push({ text, tokens }) {
    // Text after reasoning begins with empty lines.
    const shown = this.#text.hasChildNodes() ? text : text.trimStart();
    if (tokens) this.#silent.push(...tokens);
    if (!shown) return;
    this.#text.append(this.#silent.length ? tokenSpan(shown, this.#silent) : shown);
    this.#silent = [];
  }

  end() {
    if (this.#silent.length) this.#text.append(tokenSpan('', this.#silent));
    this.#silent = [];
  }
}

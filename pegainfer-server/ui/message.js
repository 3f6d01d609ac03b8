// One turn on the screen: the prompt, the reasoning, the response, and its summary.

import { splitFiles } from './attachments.js';
import { Body } from './body.js';
import { copyButton } from './clipboard.js';
import { element } from './dom.js';
import { iconButton } from './icons.js';
import { thumbnail } from './images.js';

/** A turn in the conversation `log`. */
export class TurnView {
  #root;
  #message;
  #question;
  #reasoning = null;
  #content;
  #resend;
  #log;
  #error = null;

  /** `message`: `{prompt, images}`. `resend(message)` is called with what to send instead of this turn and those after it. */
  constructor(log, message, resend) {
    this.#log = log;
    this.#message = message;
    this.#resend = resend;
    this.#question = element('div', { className: 'question' }, ...question(message));
    const edit = iconButton('edit', 'Edit message', () => this.#edit(edit));
    edit.classList.add('resend');
    const actions = element('div', { className: 'actions' }, copyButton('Copy message', () => message.prompt), edit);
    const body = element('div', { className: 'response' });
    this.#content = new Body(body);
    this.#root = element('article', { className: 'turn' }, this.#question, actions, body);
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
    this.#reasoning ??= this.#openReasoning();
    this.#reasoning.body.adopt(shown);
    const body = element('div', { className: 'response' });
    this.#content = new Body(body);
    this.#root.append(body);
  }

  /** Ends the turn. `content`: the response; `note`: its summary; `error`: the error message, if it failed. */
  end({ content, note, error }) {
    this.#reasoning?.body.end();
    this.#content.end();
    this.busy = false;
    if (error) this.fail(error);
    if (note) this.#root.append(element('p', { className: 'figures' }, note));
    const again = iconButton('resend', 'Regenerate the response', () => this.#resend(this.#message));
    again.classList.add('resend');
    const actions = element('div', { className: 'actions' }, again);
    if (content) actions.prepend(copyButton('Copy response', () => content));
    if (this.#bodies.some(({ hasTokens }) => hasTokens)) actions.append(this.#toggle());
    this.#root.append(actions);
  }

  /** Shows an error message at the end of the turn, instead of an earlier one. */
  fail(error) {
    this.#error?.remove();
    this.#error = element('p', { className: 'error', role: 'alert' }, error);
    this.#root.append(this.#error);
    this.#error.scrollIntoView({ block: 'nearest' });
  }

  remove() {
    this.#root.remove();
  }

  /** Puts the removed turn back, at the end of the conversation. */
  restore() {
    this.#log.append(this.#root);
  }

  get #bodies() {
    return [...(this.#reasoning ? [this.#reasoning.body] : []), this.#content];
  }

  /** A button that switches between tokens and Markdown. */
  #toggle() {
    const toggle = iconButton('tokens', 'Show tokens', () => {
      const asTokens = toggle.ariaPressed !== 'true';
      toggle.ariaPressed = asTokens;
      for (const body of this.#bodies) body.show(asTokens);
    });
    toggle.ariaPressed = true;
    return toggle;
  }

  /** Replaces the prompt by a form to edit it. Images stay. */
  #edit(opener) {
    const field = element('textarea', { value: this.#message.prompt, rows: 3, ariaLabel: 'Edited message' });
    const send = element('button', { type: 'submit', className: 'primary small resend' }, 'Send');
    const close = () => {
      form.replaceWith(this.#question);
      opener.hidden = false;
      opener.focus();
    };
    const cancel = element('button', { type: 'button', className: 'small', ariaLabel: 'Cancel the edit' }, 'Cancel');
    cancel.addEventListener('click', close);
    const form = element('form', { className: 'edit' }, field, cancel, send);
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const prompt = field.value.trim();
      if (prompt || this.#message.images.length) this.#resend({ ...this.#message, prompt });
    });
    form.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      close();
    });
    opener.hidden = true;
    this.#question.replaceWith(form);
    field.focus();
  }

  #openReasoning() {
    const summary = element('summary', {}, 'Reasoning …');
    const text = element('div');
    this.#root.querySelector('.response').before(element('details', { className: 'reasoning' }, summary, text));
    return { summary, body: new Body(text) };
  }
}

/** The parts of a message: its images, its files, closed, and its text. */
function question({ prompt, images }) {
  const { text, files } = splitFiles(prompt);
  const entries = files.map(({ name, content }) => {
    const body = element('pre', { tabIndex: 0 }, content);
    return element('details', { className: 'file' }, element('summary', {}, name), body);
  });
  const pictures = images.length ? [element('div', { className: 'images' }, images.map(thumbnail))] : [];
  return [element('span', { className: 'unseen' }, 'You: '), ...pictures, ...entries, text];
}

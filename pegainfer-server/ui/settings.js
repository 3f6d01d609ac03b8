// Settings that are sent with every prompt. A blank field is not sent, so that the model's default applies. The system prompt
// belongs to the chat; new chats begin with the one that the user has chosen for them.

import { byId } from './dom.js';
import { BROWSER, recall, remember } from './storage.js';

const STORE = 'pegainfer.settings';
const SYSTEM = 'pegainfer.system';
const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
/** Number of alternatives that the card of a token lists. */
const TOP_LOGPROBS = 5;

export class Settings {
  #form;
  #system = byId('system');

  /** `onSystem` is called when the user changes the system prompt. */
  constructor(form, onSystem) {
    this.#form = form;
    this.#restore(recall(BROWSER, STORE, {}));
    this.system = this.ownSystem;
    form.addEventListener('submit', (event) => event.preventDefault());
    form.addEventListener('input', () => {
      remember(BROWSER, STORE, this.#values());
      this.#offerSystem();
    });
    this.#system.addEventListener('input', onSystem);
    // The fields are reset only after the event.
    form.addEventListener('reset', () => {
      setTimeout(() => {
        remember(BROWSER, STORE, this.#values());
        this.system = this.ownSystem;
        onSystem();
      });
    });
    byId('system-default').addEventListener('click', () => {
      remember(BROWSER, SYSTEM, this.system);
      this.#offerSystem();
      this.#system.focus();
    });
  }

  /** The system prompt of the chat that is shown; may be empty. */
  get system() {
    return this.#system.value.trim();
  }

  set system(text) {
    this.#system.value = text;
    this.#offerSystem();
  }

  /** The system prompt of new chats. */
  get ownSystem() {
    return recall(BROWSER, SYSTEM, '');
  }

  /** Whether all fields are valid. */
  get isValid() {
    return this.#form.checkValidity();
  }

  /** Lets the browser say what is wrong with the first invalid field, which has to be visible. */
  report() {
    this.#form.reportValidity();
  }

  /** Request fields besides the messages. */
  get request() {
    const request = {};
    for (const name of NUMBERS) {
      if (this.#field(name).value !== '') request[name] = Number(this.#field(name).value);
    }
    const stop = this.#field('stop').value.split('\n').filter((line) => line !== '');
    if (stop.length) request.stop = stop;
    const thinking = this.#field('thinking').value;
    if (thinking) request.chat_template_kwargs = { enable_thinking: thinking === 'on' };
    if (this.#field('probabilities').checked) Object.assign(request, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return request;
  }

  #field(name) {
    return this.#form.elements.namedItem(name);
  }

  #offerSystem() {
    byId('system-default').hidden = this.system === this.ownSystem;
    byId('system-default').textContent = this.system ? 'Use for new chats' : 'Use none for new chats';
  }

  /** Values of all fields that have a name; the system prompt has none. */
  #values() {
    const named = [...this.#form.elements].filter(({ name }) => name);
    const value = (field) => (field.type === 'checkbox' ? field.checked : field.value);
    return Object.fromEntries(named.map((field) => [field.name, value(field)]));
  }

  #restore(values) {
    for (const [name, value] of Object.entries(values)) {
      const field = this.#field(name);
      if (field) field[field.type === 'checkbox' ? 'checked' : 'value'] = value;
    }
  }
}

// Settings that are sent with every prompt. A blank field is not sent, so that the model's default applies.

import { byId, recall, remember } from './dom.js';

const STORE = 'pegainfer.settings';
const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
/** Number of alternatives that the card of a token lists. */
const TOP_LOGPROBS = 5;

export class Settings {
  #form;
  #key;

  /** `onKey` is called with a new API key. */
  constructor(form, onKey) {
    this.#form = form;
    this.#key = byId('api-key');
    this.#restore(recall(STORE, {}));
    form.addEventListener('submit', (event) => event.preventDefault());
    form.addEventListener('input', () => remember(STORE, this.#values()));
    // The fields are reset only after the event.
    form.addEventListener('reset', () => setTimeout(() => remember(STORE, this.#values())));
    this.#key.addEventListener('change', () => onKey(this.key));
  }

  /** Sent as the bearer token; never stored. */
  get key() {
    return this.#key.value.trim();
  }

  /** The system prompt; may be empty. */
  get system() {
    return this.#field('system').value.trim();
  }

  set system(text) {
    this.#field('system').value = text;
    remember(STORE, this.#values());
  }

  /** Whether all fields are valid; otherwise the browser marks the invalid one. */
  get isValid() {
    return this.#form.reportValidity();
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

  /** Values of all fields that have a name; the API key has none. */
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

// The API key: kept until the tab is closed, or in the browser if the user wants that, and the dialog that asks for it.

import { byId } from './dom.js';
import { BROWSER, TAB, recall, remember } from './storage.js';

const STORE = 'pegainfer.key';

export class Key {
  #dialog = byId('key-dialog');
  #field = byId('api-key');
  #changed;
  #value;
  /** Resolves the question that is open. */
  #answer = null;

  /** `changed` is called with a new key. */
  constructor(changed) {
    this.#changed = changed;
    this.#value = recall(TAB, STORE, null) ?? recall(BROWSER, STORE, '');
    byId('key-open').addEventListener('click', () => this.ask('Requests carry this key.'));
    byId('key-cancel').addEventListener('click', () => this.#dialog.close());
    byId('key-forget').addEventListener('click', () => this.#set('', false));
    byId('key-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#set(this.#field.value.trim(), byId('key-remember').checked);
    });
    this.#dialog.addEventListener('close', () => this.#close(false));
    this.#describe();
  }

  /** Sent as the bearer token; may be empty. */
  get value() {
    return this.#value;
  }

  /** Opens the dialog. Resolves to whether the user has given a key. */
  ask(why) {
    if (!this.#dialog.open) {
      byId('key-why').textContent = why;
      this.#field.value = this.#value;
      byId('key-remember').checked = recall(BROWSER, STORE, '') !== '';
      byId('key-forget').hidden = !this.#value;
      this.#dialog.showModal();
      this.#field.focus();
      this.#field.select();
    }
    this.#answer?.(false);
    return new Promise((resolve) => {
      this.#answer = resolve;
    });
  }

  /** Opens the dialog because the server has refused a request. */
  askAgain() {
    return this.ask(this.#value ? 'The server refused this key. Enter another one.' : 'This server needs an API key.');
  }

  #set(value, isRemembered) {
    this.#value = value;
    remember(TAB, STORE, value && !isRemembered ? value : null);
    remember(BROWSER, STORE, value && isRemembered ? value : null);
    this.#describe();
    this.#close(value !== '');
    this.#changed();
  }

  #close(given) {
    const answer = this.#answer;
    this.#answer = null;
    this.#field.value = '';
    this.#dialog.close();
    answer?.(given);
  }

  #describe() {
    const kept = recall(BROWSER, STORE, '') ? 'Remembered in this browser.' : 'Kept until the tab is closed.';
    byId('key-state').textContent = this.#value ? kept : 'None.';
    byId('key-open').textContent = this.#value ? 'Change the key' : 'Enter a key';
  }
}

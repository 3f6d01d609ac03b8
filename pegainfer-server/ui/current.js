// The chat that is shown: its name, model and system prompt, and its saving while it grows.

import { splitFiles } from './attachments.js';
import { TAB, recall, remember } from './storage.js';

const STORE = 'pegainfer.chat';
/** Milliseconds between two savings of a growing response. */
const PAUSE = 1000;
const TITLE = 60;

export class CurrentChat {
  #store;
  #read;
  #saved;
  #chat = fresh();
  #timer = null;

  /** `read()` gives the `{model, system, turns}` of now; `saved(error)` is called after a saving, with a message if it failed. */
  constructor(store, read, saved) {
    this.#store = store;
    this.#read = read;
    this.#saved = saved;
  }

  get id() {
    return this.#chat.id;
  }

  /** Id of the chat that this tab has shown before a reload; null if there is none. */
  static get last() {
    return recall(TAB, STORE, null);
  }

  /** Takes the title that the list has, where the chat may have been renamed. */
  rename(summaries) {
    const found = summaries.find(({ id, named }) => named && id === this.id);
    if (found) Object.assign(this.#chat, { title: found.title, named: true });
  }

  /** Begins another chat, or goes on with a stored one. */
  begin(chat = fresh()) {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#chat = chat;
    remember(TAB, STORE, chat.id);
  }

  /** The chat has changed: saves it soon. */
  touch() {
    this.#timer ??= setTimeout(() => this.save(), PAUSE);
  }

  /** Saves the chat now, unless nothing has been said. */
  async save() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const { model, system, turns } = this.#read();
    if (!turns.length) return;
    const title = this.#chat.title || titleOf(turns[0]);
    Object.assign(this.#chat, { title, model, system, updated: Date.now() });
    try {
      await this.#store.put({ ...this.#chat, turns });
      this.#saved(null);
    } catch (error) {
      this.#saved(`This chat cannot be saved: ${error?.message ?? 'the store refuses it'}.`);
    }
  }

  /** Saves what is not yet saved, before the tab is left. */
  flush() {
    if (this.#timer !== null) this.save();
  }
}

function fresh() {
  // `crypto.randomUUID` is missing where the web UI comes over plain HTTP from another machine.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  return { id, title: '', named: false, model: null, system: '', updated: 0 };
}

/** The first words of a turn's prompt, or the name of its first file or image. */
function titleOf({ prompt, images = [] }) {
  const { text, files } = splitFiles(prompt);
  const line = (text.trim() || files[0]?.name || images[0]?.name || 'Chat').replace(/\s+/g, ' ');
  return line.length > TITLE ? `${line.slice(0, TITLE - 1).trimEnd()}…` : line;
}

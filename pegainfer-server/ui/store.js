// The chats that this browser keeps, in IndexedDB: summaries for the list, and the turns of each chat. Where there is no
// IndexedDB, chats last until the tab is closed.

import { TAB, recall, remember } from './storage.js';

const NAME = 'pegainfer';
const SUMMARIES = 'summaries';
const TURNS = 'turns';
/** Milliseconds after which a browser that neither opens the store nor refuses it is taken to have none. */
const PATIENCE = 3000;

/** Opens the store. A chat is `{id, title, named, model, updated, system, turns}`, a summary is one without the last two. */
export async function openStore() {
  try {
    return new Database(await open());
  } catch {
    return new TabStore();
  }
}

function open() {
  return new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error('the store does not open')), PATIENCE);
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SUMMARIES, { keyPath: 'id' });
      request.result.createObjectStore(TURNS, { keyPath: 'id' });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error('another tab holds an older store'));
  });
}

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const split = ({ system, turns, ...summary }) => [summary, { id: summary.id, system, turns }];
const newestFirst = (summaries) => summaries.toSorted((a, b) => b.updated - a.updated);

/** True if the text of a chat contains `words`, in lower case. */
const contains = (turns, words) =>
  turns.some(({ prompt, content }) => prompt.toLowerCase().includes(words) || content.toLowerCase().includes(words));

class Database {
  isLasting = true;
  #database;
  #channel = new BroadcastChannel(NAME);

  constructor(database) {
    this.#database = database;
    // A later version of the web UI in another tab may change the form of the store.
    database.onversionchange = () => database.close();
  }

  /** Calls `changed(id)` when another tab has changed a chat. */
  watch(changed) {
    this.#channel.addEventListener('message', ({ data }) => changed(data));
  }

  async list() {
    return newestFirst(await result(this.#objects(SUMMARIES).getAll()));
  }

  /** Ids of the chats whose text contains `words`. One chat at a time is in memory. */
  find(words) {
    return new Promise((resolve, reject) => {
      const found = new Set();
      const request = this.#objects(TURNS).openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve(found);
        if (contains(cursor.value.turns, words)) found.add(cursor.key);
        return cursor.continue();
      };
    });
  }

  /** A whole chat; null if there is none. */
  async get(id) {
    const [summary, rest] = await Promise.all([result(this.#objects(SUMMARIES).get(id)), result(this.#objects(TURNS).get(id))]);
    return summary && rest ? { ...summary, ...rest } : null;
  }

  put(chat) {
    const [summary, rest] = split(chat);
    return this.#write(chat.id, (summaries, turns) => {
      summaries.put(summary);
      turns.put(rest);
    });
  }

  /** Changes fields of a summary. */
  async change(id, fields) {
    const summary = await result(this.#objects(SUMMARIES).get(id));
    if (summary) await this.#write(id, (summaries) => summaries.put({ ...summary, ...fields }));
  }

  remove(id) {
    return this.#write(id, (summaries, turns) => {
      summaries.delete(id);
      turns.delete(id);
    });
  }

  #objects(name) {
    return this.#database.transaction(name).objectStore(name);
  }

  #write(id, change) {
    return new Promise((resolve, reject) => {
      const transaction = this.#database.transaction([SUMMARIES, TURNS], 'readwrite');
      transaction.oncomplete = () => {
        this.#channel.postMessage(id);
        resolve();
      };
      transaction.onabort = () => reject(transaction.error);
      change(transaction.objectStore(SUMMARIES), transaction.objectStore(TURNS));
      // Without this, the changes are lost if the tab is closed now.
      transaction.commit();
    });
  }
}

/** Chats of this tab, which outlive a reload if they are small. */
class TabStore {
  isLasting = false;
  #chats = new Map(recall(TAB, 'pegainfer.chats', []));

  watch() {}

  async list() {
    return newestFirst([...this.#chats.values()].map((chat) => split(chat)[0]));
  }

  async find(words) {
    return new Set([...this.#chats.values()].filter(({ turns }) => contains(turns, words)).map(({ id }) => id));
  }

  async get(id) {
    return structuredClone(this.#chats.get(id) ?? null);
  }

  async put(chat) {
    this.#chats.set(chat.id, structuredClone(chat));
    this.#keep();
  }

  async change(id, fields) {
    if (this.#chats.has(id)) await this.put({ ...this.#chats.get(id), ...fields });
  }

  async remove(id) {
    this.#chats.delete(id);
    this.#keep();
  }

  #keep() {
    remember(TAB, 'pegainfer.chats', [...this.#chats]);
  }
}

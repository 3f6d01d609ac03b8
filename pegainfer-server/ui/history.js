// The list of chats: search, rename, delete with undo.

import { byId, element } from './dom.js';
import { iconButton } from './icons.js';
import { count } from './words.js';

/** Milliseconds for which a deleted chat can be brought back. */
const UNDO = 10_000;
/** Maximum number of entries that are drawn; the search finds the others. */
const SHOWN = 500;
const DAY = 86_400_000;

export class History {
  #store;
  #open;
  #removed;
  #listed;
  #list = byId('chats');
  #search = byId('chat-search');
  #summaries = [];
  #current = null;
  /** Number of the newest drawing: an older search that ends later is dropped. */
  #drawing = 0;
  #timer = null;

  /** `open(id)` shows a chat; `removed(id)` is called after one was deleted, `listed(summaries)` after the list was read. */
  constructor(store, open, removed, listed) {
    this.#store = store;
    this.#open = open;
    this.#removed = removed;
    this.#listed = listed;
    byId('chats-note').hidden = store.isLasting;
    this.#search.addEventListener('input', () => this.#draw());
    this.#list.addEventListener('keydown', (event) => this.#move(event));
    this.#search.addEventListener('keydown', (event) => this.#move(event));
  }

  /** Marks the chat that is shown; null for a new one. */
  set current(id) {
    this.#current = id;
    for (const entry of this.#list.querySelectorAll('.chat')) mark(entry, entry.dataset.id === id);
  }

  /** Reads the list again. */
  async refresh() {
    this.#summaries = await this.#store.list();
    this.#listed(this.#summaries);
    await this.#draw();
  }

  async #draw() {
    this.#drawing += 1;
    const drawing = this.#drawing;
    const words = this.#search.value.trim().toLowerCase();
    const found = words ? await this.#store.find(words) : null;
    if (drawing !== this.#drawing || this.#list.querySelector('form')) return;
    const matches = ({ id, title }) => !found || found.has(id) || title.toLowerCase().includes(words);
    const shown = this.#summaries.filter(matches);
    const focused = document.activeElement?.closest?.('.chat')?.dataset.id;
    const place = document.activeElement?.className;
    this.#list.replaceChildren(...groups(shown.slice(0, SHOWN)).flatMap(([title, chats]) => this.#group(title, chats)));
    this.#restoreFocus(focused, place);
    byId('chats-empty').hidden = shown.length > 0;
    byId('chats-empty').textContent = words ? 'No chat contains this.' : 'Your chats appear here.';
    byId('found').textContent = words ? `${shown.length} found` : '';
  }

  #restoreFocus(id, place) {
    const entry = id && this.#entryOf(id);
    if (entry) (entry.getElementsByClassName(place)[0] ?? entry.querySelector('.open')).focus();
  }

  #entryOf(id) {
    return [...this.#list.querySelectorAll('.chat')].find((entry) => entry.dataset.id === id);
  }

  #group(title, chats) {
    return [element('li', { className: 'group', role: 'presentation' }, title), ...chats.map((chat) => this.#entry(chat))];
  }

  #entry({ id, title }) {
    const open = element('button', { type: 'button', className: 'open', title }, title);
    open.addEventListener('click', () => this.#open(id));
    const rename = iconButton('edit', `Rename ${title}`, () => this.#rename(entry, id, title));
    const remove = iconButton('remove', `Delete ${title}`, () => this.#remove(id, title));
    open.addEventListener('keydown', (event) => {
      if (event.key === 'F2') this.#rename(entry, id, title);
      if (event.key === 'Delete') this.#remove(id, title);
    });
    const entry = element('li', { className: 'chat' }, open, rename, remove);
    entry.dataset.id = id;
    mark(entry, id === this.#current);
    return entry;
  }

  /** Replaces an entry by a field with its title. */
  #rename(entry, id, title) {
    const field = element('input', { value: title, maxLength: 200, ariaLabel: 'Title of the chat' });
    const form = element('form', {}, field);
    let isOpen = true;
    const close = async (renamed) => {
      if (!isOpen) return;
      isOpen = false;
      form.remove();
      if (renamed && renamed !== title) await this.#store.change(id, { title: renamed, named: true });
      await this.refresh();
      this.#restoreFocus(id, 'open');
    };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      close(field.value.trim());
    });
    field.addEventListener('keydown', (event) => {
      event.stopPropagation();
      if (event.key === 'Escape') close('');
    });
    field.addEventListener('blur', () => close(field.value.trim()));
    entry.replaceChildren(form);
    field.select();
    field.focus();
  }

  async #remove(id, title) {
    const chat = await this.#store.get(id);
    const ids = this.#summaries.map((summary) => summary.id);
    const next = ids[ids.indexOf(id) + 1] ?? ids[ids.indexOf(id) - 1];
    await this.#store.remove(id);
    this.#removed(id);
    await this.refresh();
    (this.#entryOf(next)?.querySelector('.open') ?? this.#search).focus();
    if (chat) this.#offerUndo(`Deleted “${title}”`, [chat]);
  }

  /** Deletes every chat. */
  async removeAll() {
    const chats = await Promise.all(this.#summaries.map(({ id }) => this.#store.get(id)));
    for (const { id } of this.#summaries) await this.#store.remove(id);
    this.#removed(this.#current);
    await this.refresh();
    if (chats.length) this.#offerUndo(`Deleted ${count(chats.length, 'chat')}`, chats.filter(Boolean));
  }

  #offerUndo(words, chats) {
    const undo = element('button', { type: 'button', className: 'small' }, 'Undo');
    const close = () => byId('undo').replaceChildren();
    undo.addEventListener('click', async () => {
      close();
      for (const chat of chats) await this.#store.put(chat);
      await this.refresh();
      this.#open(chats[0].id);
    });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(close, UNDO);
    byId('undo').replaceChildren(element('span', {}, words), undo);
  }

  /** Moves the focus between entries with the arrow keys. */
  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || event.target.closest('form')) return;
    const stops = [this.#search, ...this.#list.querySelectorAll('.open')];
    const at = stops.indexOf(document.activeElement.closest('.chat')?.querySelector('.open') ?? document.activeElement);
    const next = at >= 0 && stops[at + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

function mark(entry, isCurrent) {
  entry.classList.toggle('current', isCurrent);
  if (isCurrent) entry.querySelector('.open')?.setAttribute('aria-current', 'true');
  else entry.querySelector('.open')?.removeAttribute('aria-current');
}

/** Summaries by age, `[title, summaries]`, newest first. */
function groups(summaries) {
  const today = new Date().setHours(0, 0, 0, 0);
  const ages = [[today, 'Today'], [today - DAY, 'Yesterday'], [today - 7 * DAY, 'Last seven days'], [-Infinity, 'Older']];
  const made = ages.map(([, title]) => [title, []]);
  for (const summary of summaries) made[ages.findIndex(([start]) => summary.updated >= start)][1].push(summary);
  return made.filter(([, chats]) => chats.length);
}

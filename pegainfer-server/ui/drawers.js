// The list of chats on the left and the panel on the right. On a wide window they stand next to the conversation; on a narrow
// one each covers it, and the rest is then inert.

import { byId } from './dom.js';
import { BROWSER, recall, remember } from './storage.js';

const STORE = 'pegainfer.drawers';
/** Window width below which the style lets a drawer cover the conversation, and below which only the list is open at first. */
const narrow = matchMedia('(max-width: 899px)');
const medium = matchMedia('(max-width: 1199px)');

export class Drawers {
  #sides = {
    chats: { toggle: byId('chats-toggle'), close: byId('chats-close'), root: byId('chats-panel') },
    panel: { toggle: byId('panel-toggle'), close: byId('panel-close'), root: byId('panel') },
  };
  #open = { chats: false, panel: false };

  constructor() {
    for (const [side, { toggle, close }] of Object.entries(this.#sides)) {
      toggle.addEventListener('click', () => (this.#open[side] ? this.close(side) : this.open(side)));
      close.addEventListener('click', () => this.close(side));
    }
    byId('backdrop').addEventListener('click', () => this.closeCover());
    narrow.addEventListener('change', () => this.#begin());
    this.#begin();
  }

  get isNarrow() {
    return narrow.matches;
  }

  open(side, focused = this.#sides[side].close) {
    if (narrow.matches) for (const other of Object.keys(this.#open)) this.#open[other] = false;
    this.#open[side] = true;
    this.#show();
    focused.focus();
  }

  close(side) {
    this.#open[side] = false;
    this.#show();
    this.#sides[side].toggle.focus();
  }

  /** Closes the drawer that covers the conversation; returns whether there was one. */
  closeCover() {
    const side = narrow.matches && Object.keys(this.#open).find((name) => this.#open[name]);
    if (side) this.close(side);
    return Boolean(side);
  }

  /** On a narrow window all are closed at first; on a wide one they are as the user left them. */
  #begin() {
    const kept = recall(BROWSER, STORE, { chats: true, panel: !medium.matches });
    this.#open = narrow.matches ? { chats: false, panel: false } : kept;
    this.#show(false);
  }

  #show(isKept = true) {
    for (const [side, { toggle }] of Object.entries(this.#sides)) {
      document.body.classList.toggle(`${side}-open`, this.#open[side]);
      toggle.setAttribute('aria-expanded', this.#open[side]);
    }
    const covered = narrow.matches && (this.#open.chats || this.#open.panel);
    document.querySelector('main').inert = covered;
    document.querySelector('header').inert = covered;
    byId('backdrop').hidden = !covered;
    if (isKept && !narrow.matches) remember(BROWSER, STORE, this.#open);
  }
}

// Small values that the browser keeps: of this tab until it is closed, or of all tabs. A store may be full or forbidden; then
// values hold until the web UI is left.

/** Names of the stores. */
export const TAB = 'sessionStorage';
export const BROWSER = 'localStorage';

/** The value under `key`; `fallback` if there is none or it cannot be parsed. */
export function recall(store, key, fallback) {
  try {
    return JSON.parse(window[store].getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Stores `value` under `key`, or removes it if it is null. Returns whether this worked. */
export function remember(store, key, value) {
  try {
    if (value === null) window[store].removeItem(key);
    else window[store].setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

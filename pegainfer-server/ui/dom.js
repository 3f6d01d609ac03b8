// Creates elements in one expression. Text is only ever inserted as text: nothing here parses markup.

const SVG = 'http://www.w3.org/2000/svg';

/** Maximum number of nodes in one call of the browser: all of a call's arguments are on the stack. */
const SLICE = 1024;

/** An element with these properties (`className`, `textContent`, ...) and children, which may be in lists. */
export function element(tag, properties = {}, ...children) {
  return fill(Object.assign(document.createElement(tag), properties), children.flat());
}

/** Appends any number of nodes and texts to `parent`. */
export function fill(parent, children) {
  for (let at = 0; at < children.length; at += SLICE) parent.append(...children.slice(at, at + SLICE));
  return parent;
}

/** An SVG element with these attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** The value that this tab has stored under `key`; `fallback` if there is none or it cannot be parsed. */
export function recall(key, fallback) {
  try {
    return JSON.parse(sessionStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Stores `value` for the lifetime of the tab. If the store is full or forbidden, the value is lost on a reload. */
export function remember(key, value) {
  try {
    sessionStorage.setItem(key, JSON.stringify(value));
  } catch (error) {
    console.warn('this conversation is lost on a reload:', error.message);
  }
}

/** Lets `button` open the dialog of the hidden field `chooser`; `take(files)` is called with the files that were chosen. */
export function chooseFiles(button, chooser, take) {
  button.addEventListener('click', () => chooser.click());
  chooser.addEventListener('change', () => {
    const files = [...chooser.files];
    // Otherwise the browser would not report that the same file is chosen again.
    chooser.value = '';
    if (files.length) take(files);
  });
}

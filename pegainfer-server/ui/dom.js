// Elements in one expression. Text only ever becomes text: nothing here parses markup.

const SVG = 'http://www.w3.org/2000/svg';

/** An element with these properties (`className`, `textContent`, ...) and children. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
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

/** What this tab remembers under `key`; `fallback` if it has nothing readable. */
export function recall(key, fallback) {
  try {
    return JSON.parse(sessionStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Remembers `value` for as long as the tab lives. A full or forbidden store costs only the memory of it. */
export function remember(key, value) {
  try {
    sessionStorage.setItem(key, JSON.stringify(value));
  } catch (error) {
    console.warn('this conversation is not kept over a reload:', error.message);
  }
}

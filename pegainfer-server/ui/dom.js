// Creates elements in one expression. Text is only ever inserted as text: nothing here parses markup.

const SVG = 'http://www.w3.org/2000/svg';
const MATHML = 'http://www.w3.org/1998/Math/MathML';

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
export const svg = (tag, attributes, ...children) => foreign(SVG, tag, attributes, children);

/** A MathML element with these attributes. */
export const mathml = (tag, attributes, ...children) => foreign(MATHML, tag, attributes, children);

function foreign(namespace, tag, attributes = {}, children = []) {
  const made = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return fill(made, children);
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

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

// Elements of MathML that several commands of LaTeX make.

import { mathml } from './dom.js';
import { INTEGRALS } from './latex-symbols.js';

export const operator = (text, attributes = {}) => mathml('mo', attributes, text);
export const space = (width) => mathml('mspace', { width: `${width}em` });
export const upright = (text) => mathml('mi', { mathvariant: 'normal' }, text);
export const fence = (text) => operator(text, { fence: 'true', stretchy: 'true', symmetric: 'true' });
export const row = (nodes) => (nodes.length === 1 ? nodes[0] : mathml('mrow', {}, ...nodes));

/** A function whose limits stand below it in a block. */
export function below(name) {
  const attributes = { movablelimits: 'true', lspace: '0', rspace: '0.167em', form: 'prefix', class: 'function' };
  return operator(name.replace(' ', '\u00a0'), attributes);
}

/** Attaches scripts to `base`, above and below it or next to it. */
export function attach(base, sub, sup, beneath) {
  const text = base.localName === 'mo' ? base.textContent : '';
  const moves = base.getAttribute('movablelimits') === 'true' && !INTEGRALS.has(text);
  if (beneath) base.setAttribute('movablelimits', 'false');
  const stack = moves || beneath || base.getAttribute('class') === 'limits';
  const tags = stack ? ['munder', 'mover', 'munderover'] : ['msub', 'msup', 'msubsup'];
  if (sub && sup) return mathml(tags[2], {}, base, sub, sup);
  return sub ? mathml(tags[0], {}, base, sub) : mathml(tags[1], {}, base, sup);
}

/** The gap between a function's name and an argument without parentheses. */
export function gap(base, source) {
  const isName = base.localName === 'mi' && /^[a-z]{2,}$/.test(base.textContent);
  return isName && !['(', '[', '{', '^', '_', ')', '}', ',', '\\left', null].includes(source.peek()) ? [space(0.167)] : [];
}

/** Upright letters in a row are one name. */
export function joined(nodes) {
  if (!nodes.length || nodes.some((node) => node.localName !== 'mi' && node.localName !== 'mn')) return row(nodes);
  return upright(nodes.map((node) => node.textContent).join(''));
}

/** Classes of a column of an array: its alignment, and the lines next to it. */
export function columnClass(column) {
  const align = { l: 'left', c: 'center', r: 'right' }[column.match(/[lcr]/)[0]];
  return `${align}${column.startsWith('|') ? ' after-line' : ''}${column.endsWith('|') ? ' before-line' : ''}`;
}

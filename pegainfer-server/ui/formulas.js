// Formulas in Markdown, as an extension of marked: `$…$` and `\(…\)` in a line, `$$…$$` and `\[…\]` as blocks.

import { element } from './dom.js';
import { latex } from './latex.js';

/** Maximum length of a formula, in characters. */
const LIMIT = 4096;
const BLOCK = /^ {0,3}(?:\$\$((?:(?!\$\$)[^])+)\$\$|\\\[([^]+?)\\\]) *(?:\n|$)/;
const INLINE = new RegExp(
  [
    /^\$\$([^$]+?)\$\$/,
    /^\\\[([^]+?)\\\]/,
    /^\\\(([^]+?)\\\)/,
    /^\$(?![\s$])((?:\\[^]|[^$\\`\n]|\n(?!\s*\n))+?)(?<!\s)\$(?!\d)/,
  ].map(({ source }) => source).join('|'),
);
/** An amount of money and words, such as `5, or 10` between the signs of two amounts. */
const MONEY = /^\d[\d.,]*(?:\s*[-–/]\s*|\s+\D|[,;]\s|[a-zA-Z]*\s)/;

/** Options of marked's lexer. */
export const formulas = {
  extensions: {
    block: [blockFormula],
    startBlock: [(text) => start(text, /\n {0,3}(?:\$\$|\\\[)/, 1)],
    inline: [inlineFormula],
    startInline: [(text) => start(text, /\$|\\[([]/, 0)],
  },
  hooks: { emStrongMask: mask },
};

/** The element of a formula's token; its source if it is not well formed. */
export function formula({ text, display, raw }) {
  const math = latex(text, display);
  if (!math) return display ? element('p', { className: 'verbatim' }, raw.trim()) : raw;
  return display ? element('div', { className: 'formula', tabIndex: 0 }, math) : math;
}

function start(text, opening, skipped) {
  const at = text.slice(0, 2 * LIMIT).search(opening);
  return at < 0 ? undefined : at + skipped;
}

function blockFormula(text) {
  const found = BLOCK.exec(text.slice(0, LIMIT));
  if (found?.[0].length === LIMIT) return undefined;
  // A blank line ends a paragraph, and with it what looks like a formula in dollars.
  if (!found || /\n\s*\n/.test(found[1]?.trim() ?? '')) return undefined;
  return { type: 'formula', raw: found[0], text: found[1] ?? found[2], display: true };
}

function inlineFormula(text, tokens) {
  if (!/^(?:\$|\\[([])/.test(text)) return undefined;
  const found = INLINE.exec(text.slice(0, LIMIT));
  if (!found) return undefined;
  const [raw, dollars, brackets, parentheses, single] = found;
  if (single !== undefined && !isFormula(single, tokens.at(-1)?.raw ?? '')) return undefined;
  const display = dollars !== undefined || brackets !== undefined;
  return { type: 'formula', raw, text: dollars ?? brackets ?? parentheses ?? single, display, inline: true };
}

/** Whether `$text$` after `before` is a formula, and not text between two amounts of money. */
function isFormula(text, before) {
  if (/[\p{L}\p{N}$\\]$/u.test(before)) return false;
  return !MONEY.test(text) || /[\\^_=+<>{}]/.test(text);
}

/** Hides formulas from the search for emphasis, with as many characters. */
function mask(text) {
  if (!text.includes('$') && !text.includes('\\(')) return text;
  return text.replace(/\$[^$\n]{1,500}\$|\\\([^\n]{1,500}?\\\)/g, (raw) => `[${'a'.repeat(raw.length - 2)}]`);
}

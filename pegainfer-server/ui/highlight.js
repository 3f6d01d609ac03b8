// Colours of code: one pass over the text finds comments, strings, numbers and words.

import { element } from './dom.js';
import { LANGUAGES } from './languages.js';

/** Maximum length of code with colours, in characters. */
const LIMIT = 20_000;
const WORD = '[\\p{L}_$][\\p{L}\\p{N}_$]*';
/** Kinds of tokens in the order in which they are tried. */
const KINDS = ['comment', 'added', 'removed', 'key', 'string', 'meta', 'number', 'keyword'];

/** Expressions by language, made when they are first used. */
const expressions = new Map();

/** Texts and spans of `text` in the language that a fence names; null if the language is unknown or the text too long. */
export function highlight(text, fence) {
  const language = LANGUAGES.get(/^[\w+#-]*/.exec(fence ?? '')[0].toLowerCase());
  if (!language || text.length > LIMIT) return null;
  const expression = expressionOf(language);
  const nodes = [];
  let plain = 0;
  for (const match of text.matchAll(expression)) {
    const kind = KINDS.find((name) => match.groups[name] !== undefined) ?? wordKind(match, text, language);
    if (!kind) continue;
    if (match.index > plain) nodes.push(text.slice(plain, match.index));
    nodes.push(element('span', { className: `code-${kind}` }, match[0]));
    plain = match.index + match[0].length;
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

function expressionOf(language) {
  if (!expressions.has(language)) {
    const parts = KINDS.filter((kind) => language[kind]?.length);
    const groups = parts.map((kind) => `(?<${kind}>${[language[kind]].flat().join('|')})`);
    for (const kind of KINDS.filter((name) => !parts.includes(name))) groups.push(`(?<${kind}>(?!))`);
    expressions.set(language, new RegExp([...groups, `(?<word>${WORD})`].join('|'), 'gu'));
  }
  return expressions.get(language);
}

/** The kind of a word: a keyword, a type, or a function before its arguments. */
function wordKind({ index, 0: word }, text, { keywords, types, ignoreCase }) {
  const name = ignoreCase ? word.toLowerCase() : word;
  if (keywords.has(name)) return 'keyword';
  if (types.has(name)) return 'type';
  if (!keywords.size) return null;
  if (text[index + word.length] === '(' && /\w/.test(word)) return 'function';
  return /^[A-Z]\w*[a-z]/.test(word) && !ignoreCase ? 'type' : null;
}

// Markdown as elements. marked only splits the text into tokens: no markup of the text is ever parsed by the browser.

import { copyButton } from './clipboard.js';
import { element, fill } from './dom.js';
import { formula, formulas } from './formulas.js';
import { highlight } from './highlight.js';
import { Lexer } from './vendor/marked.js';

/** Schemes of links; a link with another one is shown as its text. */
const SCHEMES = /^(https?|mailto):/i;
const ENTITIES = { '&amp;': '&', '&lt;': '<', '&gt;': '>', '&quot;': '"', '&#39;': "'", '&nbsp;': '\u00a0' };

/** Maximum length of a paragraph, in characters, that is parsed as a whole: marked's time for some texts grows with its square. */
const MAX_INLINE = 8192;
/** Maximum number of characters in it that may begin or end something: marked searches for the partner of each. */
const MAX_MARKS = 512;
const MARK = /[*_~[\]!<`$]/g;
/** Time for the paragraphs of a text, in milliseconds; later paragraphs are plain text. */
const MAX_TIME = 300;
/** Maximum nesting of lists and quotes, and of emphasis and links. */
const MAX_DEPTH = 32;
/** While a response grows, at least this many times the duration of a rendering passes until the next. */
const PAUSE = 4;

/** A lexer whose time is bounded, whatever the text. */
class BoundedLexer extends Lexer {
  #depth = 0;
  #inlineDepth = 0;
  /** Time after which paragraphs are plain text; they come after the blocks. */
  #due;

  blockTokens(text, tokens, ...rest) {
    if (this.#depth === MAX_DEPTH) throw new RangeError('blocks are nested too deeply');
    this.#depth += 1;
    const parsed = super.blockTokens(text, tokens, ...rest);
    this.#depth -= 1;
    return parsed;
  }

  inlineTokens(text, tokens = []) {
    if (isCheap(text)) return this.#inlineTokens(text, tokens);
    for (const [at, line] of text.split('\n').entries()) {
      if (at > 0) tokens.push({ type: 'br', raw: '\n' });
      if (isCheap(line)) this.#inlineTokens(line, tokens);
      else tokens.push(plain(line));
    }
    return tokens;
  }

  #inlineTokens(text, tokens) {
    this.#due ??= performance.now() + MAX_TIME;
    if (this.#inlineDepth === MAX_DEPTH || performance.now() > this.#due) {
      tokens.push(plain(text));
      return tokens;
    }
    this.#inlineDepth += 1;
    super.inlineTokens(text, tokens);
    this.#inlineDepth -= 1;
    return tokens;
  }
}

const isCheap = (text) => text.length <= MAX_INLINE && (text.match(MARK)?.length ?? 0) <= MAX_MARKS;
const plain = (text) => ({ type: 'text', raw: text, text });

/** Shows Markdown that arrives in parts in `root`, at most once a frame. */
export class MarkdownView {
  #root;
  /** The whole text, and the part of it whose blocks may still change. */
  #text = '';
  #tail = '';
  #frame = null;
  /** Time before which nothing is rendered, on the clock of `performance.now()`. */
  #due = 0;
  /** Elements of the tail. */
  #open = [];

  constructor(root) {
    this.#root = root;
  }

  push({ text }) {
    this.#text += text;
    this.#tail += text;
    this.#schedule();
  }

  #schedule() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      const started = performance.now();
      if (started < this.#due) return this.#schedule();
      this.#grow();
      const ended = performance.now();
      this.#due = ended + PAUSE * (ended - started);
    });
  }

  /** Ends the text. It is split once more as a whole, because a link may refer to a definition in a later block. */
  end() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.#root.replaceChildren();
    fill(this.#root, blocks(parse(this.#text)));
  }

  /** Renders the tail again. All blocks but its last are then complete, so the cost does not grow with the text. */
  #grow() {
    const tokens = parse(this.#tail);
    const last = tokens.findLastIndex(({ type }) => type !== 'space');
    const complete = tokens.slice(0, Math.max(0, last));
    const open = blocks(tokens.slice(Math.max(0, last)));
    for (const node of this.#open) node.remove();
    fill(this.#root, blocks(complete));
    fill(this.#root, open);
    this.#open = open;
    this.#tail = this.#tail.slice(complete.reduce((length, { raw }) => length + raw.length, 0));
  }
}

/** Tokens of the blocks. Text that is nested too deeply for the parser is one paragraph. */
function parse(text) {
  try {
    return new BoundedLexer({ gfm: true, breaks: true, ...formulas }).lex(text.replace(/\r\n?/g, '\n'));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [{ type: 'html', raw: text, text }];
  }
}

const blocks = (tokens) => tokens.flatMap((token) => block(token));
const inlines = (tokens) => tokens.flatMap((token) => inline(token));

/** Elements of a block. Markup and blocks without a form of their own are shown as text. */
function block(token) {
  switch (token.type) {
    case 'space':
    case 'def':
      return [];
    case 'paragraph':
      return element('p', {}, inlines(token.tokens));
    case 'heading':
      // The web UI has headings of the first two levels itself.
      return element(`h${Math.min(token.depth + 2, 6)}`, {}, inlines(token.tokens));
    case 'code':
      return code(token);
    case 'formula':
      return formula(token);
    case 'blockquote':
      return element('blockquote', {}, blocks(token.tokens));
    case 'list':
      return list(token);
    case 'table':
      return table(token);
    case 'hr':
      return element('hr');
    case 'html':
      return element('p', { className: 'verbatim' }, token.text);
    default:
      return inline(token);
  }
}

/** Nodes of a part of a line. */
function inline(token) {
  switch (token.type) {
    case 'strong':
    case 'em':
    case 'del':
      return element(token.type, {}, inlines(token.tokens));
    case 'codespan':
      return element('code', {}, token.text);
    case 'br':
      return element('br');
    case 'link':
      return link(token, inlines(token.tokens));
    case 'image':
      // Images of other hosts are not loaded: they would reveal the topic of the conversation.
      return link(token, [token.text || token.href]);
    case 'formula':
      return formula(token);
    case 'checkbox':
      return token.checked ? '☑ ' : '☐ ';
    case 'text':
      return token.tokens ? inlines(token.tokens) : token.text.replace(/&[a-z#0-9]+;/g, (name) => ENTITIES[name] ?? name);
    default:
      return token.text ?? token.raw;
  }
}

function link({ href }, children) {
  if (!SCHEMES.test(href)) return children;
  return element('a', { href, rel: 'noopener noreferrer', target: '_blank' }, children);
}

function code({ text, lang }) {
  const bar = element('div', { className: 'code-bar' }, element('span', {}, lang ?? ''), copyButton('Copy code', () => text));
  const body = element('code', {}, highlight(text, lang) ?? text);
  return element('div', { className: 'code' }, bar, element('pre', { tabIndex: 0 }, body));
}

function list({ ordered, start, items }) {
  const entries = items.map((item) => element('li', {}, blocks(item.tokens)));
  return ordered ? element('ol', { start: start || 0 }, entries) : element('ul', {}, entries);
}

function table({ header, rows }) {
  const cell = (tag) => ({ tokens, align }) => element(tag, { className: align ?? '' }, inlines(tokens));
  const body = rows.map((row) => element('tr', {}, row.map(cell('td'))));
  const head = element('thead', {}, element('tr', {}, header.map(cell('th'))));
  const region = { className: 'wide', tabIndex: 0, role: 'region', ariaLabel: 'Table' };
  return element('div', region, element('table', {}, head, element('tbody', {}, body)));
}

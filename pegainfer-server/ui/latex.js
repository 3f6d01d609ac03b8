// The common part of LaTeX's mathematics as MathML, which browsers draw themselves. Unknown commands stay as text.

import { mathml } from './dom.js';
import { COMMANDS } from './latex-commands.js';
import { attach, below, columnClass, fence, gap, joined, operator, row, space, upright } from './latex-nodes.js';
import { BIG, SILENT, escaped, Source } from './latex-source.js';
import * as symbols from './latex-symbols.js';

/** Maximum nesting of groups. */
const MAX_DEPTH = 40;

/** The `<math>` element of `tex`; null if it is not well formed. `display`: as a block. */
export function latex(tex, display) {
  try {
    const content = new Parser(new Source(tex)).rows();
    return mathml('math', { alttext: tex.trim(), ...(display && { display: 'block' }) }, content);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return null;
  }
}

class Parser {
  #source;
  #depth = 0;
  /** Style of letters, such as `bold`; null for the usual one. */
  #font = null;

  constructor(source) {
    this.#source = source;
  }

  /** The whole text. Lines that `\\` ends are rows of a table. */
  rows() {
    const lines = [[]];
    for (;;) {
      lines.at(-1).push(...this.#until((token) => token === '\\\\' || token === '&'));
      const token = this.#source.next();
      if (token === null) break;
      if (token === '\\\\') lines.push([]);
    }
    if (lines.length === 1) return mathml('mrow', {}, ...lines[0]);
    return mathml('mtable', {}, ...lines.map((line) => mathml('mtr', {}, mathml('mtd', {}, ...line))));
  }

  /** The nodes before the first token for which `ends` holds, or before the end of the text. */
  #until(ends) {
    if (this.#depth >= MAX_DEPTH) throw new SyntaxError('groups are nested too deeply');
    this.#depth += 1;
    const nodes = [];
    const font = this.#font;
    for (let token = this.#source.peek(); token !== null && !ends(token); token = this.#source.peek()) {
      if (token === '}' || token === '\\right' || token === '\\end') throw new SyntaxError(`${token} without a partner`);
      if (this.#infix(token, nodes, ends)) continue;
      nodes.push(...this.#scripted());
    }
    this.#font = font;
    this.#depth -= 1;
    return nodes;
  }

  /** `a \over b`: everything before and after the command in its group. */
  #infix(token, nodes, ends) {
    if (!['\\over', '\\choose', '\\atop'].includes(token)) return false;
    this.#source.next();
    const below = row(this.#until(ends));
    const above = row(nodes.splice(0));
    const bare = token === '\\over' ? {} : { linethickness: '0' };
    const fraction = mathml('mfrac', bare, above, below);
    nodes.push(...(token === '\\choose' ? [fence('('), fraction, fence(')')] : [fraction]));
    return true;
  }

  /** One atom with its scripts. */
  #scripted() {
    const token = this.#source.peek();
    const nodes = '^_\''.includes(token) ? [mathml('mrow')] : this.#atom();
    let sub = null;
    let sup = [];
    let beneath = false;
    for (;;) {
      const next = this.#source.peek();
      if (next === '_' && !sub) {
        this.#source.next();
        sub = this.argument;
      } else if (next === '^') {
        this.#source.next();
        sup.push(this.argument);
      } else if (next === '\'') {
        this.#source.next();
        sup.push(operator('′'));
      } else if (next === '\\limits' || next === '\\nolimits') {
        this.#source.next();
        beneath = next === '\\limits';
      } else break;
    }
    if (!sub && !sup.length) return nodes;
    const base = nodes.pop() ?? mathml('mrow');
    return [...nodes, attach(base, sub, sup.length ? row(sup) : null, beneath), ...gap(base, this.#source)];
  }

  /** A group or a single token, as the argument of a command. */
  get argument() {
    const token = this.#source.peek();
    if (token === null || token === '}') throw new SyntaxError('an argument is missing');
    if (token === '{') return row(this.#group());
    if (this.#depth >= MAX_DEPTH) throw new SyntaxError('arguments are nested too deeply');
    this.#depth += 1;
    const nodes = this.#atom(true);
    this.#depth -= 1;
    return row(nodes);
  }

  #group() {
    this.#source.expect('{');
    const nodes = this.#until((token) => token === '}');
    this.#source.expect('}');
    return nodes;
  }

  /** `[…]`, if it follows. */
  get option() {
    if (this.#source.peek() !== '[') return null;
    this.#source.next();
    const nodes = this.#until((token) => token === ']');
    this.#source.expect(']');
    return row(nodes);
  }

  /** Nodes of the next atom. `single`: an argument, where a number is only its first digit. */
  #atom(single = false) {
    if (this.#source.peek() === '{') return [mathml('mrow', {}, ...this.#group())];
    const token = this.#source.next(single);
    if (token.length > 1 && token[0] === '\\') return this.#command(token.slice(1));
    return [this.#character(token)];
  }

  #character(text) {
    if (/^[\d.]/.test(text)) return mathml('mn', {}, this.#styled(text));
    if (/^\p{L}/u.test(text)) return this.#identifier(text);
    if (text === '~') return space(0.25);
    if (text === '-') return operator('−');
    if (text === '*') return operator('∗');
    if ('()[]|'.includes(text)) return operator(text, { stretchy: 'false', ...(text === '|' && { lspace: '0', rspace: '0' }) });
    return operator(text);
  }

  #styled(text) {
    return this.#font ? symbols.styled(text, this.#font) : text;
  }

  /** A letter in the current style. */
  #identifier(text) {
    if (this.#font === 'normal') return upright(text);
    const other = this.#styled(text);
    return other === text && /^[\u0391-\u03a9∞∅∀∃§¶]/.test(text) ? upright(text) : mathml('mi', {}, other);
  }

  #command(name) {
    const { LETTERS, OPERATORS, LARGE, FENCES, SPACES, ACCENTS, UNDER, ARROWS, FONTS, TEXTS } = symbols;
    if (LETTERS.has(name)) return [this.#identifier(LETTERS.get(name))];
    if (OPERATORS.has(name)) return [operator(OPERATORS.get(name), { stretchy: 'false' })];
    if (LARGE.has(name)) return [operator(LARGE.get(name), { largeop: 'true', movablelimits: 'true' })];
    if (FENCES.has(name)) return [operator(FENCES.get(name), { stretchy: 'false' })];
    if (name === '\\') return [space(1)];
    if (SPACES.has(name)) return [space(SPACES.get(name))];
    if (symbols.FUNCTIONS.has(name)) return this.#named(name);
    if (symbols.LIMITS.has(name)) return [below(symbols.LIMITS.get(name))];
    if (FONTS.has(name)) return this.#withFont(FONTS.get(name));
    if (TEXTS.has(name)) return [this.#text(TEXTS.get(name))];
    if (ACCENTS.has(name)) return [this.#accent('mover', ACCENTS.get(name), name)];
    if (UNDER.has(name)) return [this.#accent('munder', UNDER.get(name), name)];
    if (ARROWS.has(name)) return [this.#arrow(ARROWS.get(name))];
    if (BIG.has(name)) return [this.#big(BIG.get(name))];
    if (SILENT.has(name)) return this.#source.skip(SILENT.get(name));
    if (Object.hasOwn(COMMANDS, name)) return [COMMANDS[name](this)].flat();
    return [escaped(name) ? this.#character(escaped(name)) : mathml('mtext', { class: 'unknown' }, `\\${name}`)];
  }

  /** A function such as `sin`, with a gap before its argument. */
  #named(name) {
    const node = upright(name);
    return ['^', '_'].includes(this.#source.peek()) ? [node] : [node, ...gap(node, this.#source)];
  }

  /** The argument in another style; the older commands, without an argument in braces, hold until the group ends. */
  #withFont(font) {
    const before = this.#font;
    this.#font = font;
    if (this.#source.peek() !== '{') return [];
    const nodes = this.#group();
    this.#font = before;
    return [font === 'normal' ? joined(nodes) : row(nodes)];
  }

  #text(style) {
    const text = this.#source.braced().replace(/\$([^$]*)\$/g, '$1').replace(/\\([{}$%&#_ ])/g, '$1');
    // MathML drops white space at the edges.
    return mathml('mtext', { ...(style && { class: style }) }, text.replace(/ /g, '\u00a0'));
  }

  #accent(tag, mark, name) {
    const stretchy = symbols.STRETCHY.test(name) ? 'true' : 'false';
    const node = mathml(tag, { [tag === 'mover' ? 'accent' : 'accentunder']: 'true' }, this.argument, operator(mark, { stretchy }));
    if (name.endsWith('brace') || name.endsWith('bracket')) node.setAttribute('class', 'limits');
    return node;
  }

  #arrow(arrow) {
    const under = this.option;
    const over = mathml('mrow', {}, space(0.4), this.argument, space(0.4));
    const shaft = operator(arrow, { stretchy: 'true' });
    return under ? mathml('munderover', {}, shaft, under, over) : mathml('mover', {}, shaft, over);
  }

  /** A fence of a fixed size. */
  #big(size) {
    const text = this.delimiter();
    return text ? operator(text, { stretchy: 'true', symmetric: 'true', minsize: size, maxsize: size }) : mathml('mrow');
  }

  /** The delimiter of `\left` and its kind; an empty text for `.`. */
  delimiter() {
    const token = this.#source.next(true);
    if (token === null) throw new SyntaxError('a delimiter is missing');
    if (token === '.') return '';
    const name = token.slice(1);
    if (token[0] !== '\\' || !name) return { '<': '⟨', '>': '⟩' }[token] ?? token;
    const found = symbols.FENCES.get(name) ?? symbols.OPERATORS.get(name) ?? { '|': '‖' }[name] ?? escaped(name);
    if (!found) throw new SyntaxError(`\\${name} is not a delimiter`);
    return found;
  }

  left() {
    const open = this.delimiter();
    const parts = [];
    for (;;) {
      parts.push(...this.#until((token) => token === '\\right' || token === '\\middle'));
      const token = this.#source.next();
      if (token === null) throw new SyntaxError('\\left without \\right');
      const text = this.delimiter();
      if (token === '\\right') return mathml('mrow', {}, ...(open ? [fence(open)] : []), ...parts, ...(text ? [fence(text)] : []));
      parts.push(fence(text));
    }
  }

  /** An environment with rows and columns. */
  environment() {
    const name = this.#source.braced().replace(/\*$/, '');
    const kind = symbols.ENVIRONMENTS.get(name);
    if (!kind) throw new SyntaxError(`unknown environment ${name}`);
    let { align = ['center'] } = kind;
    if (/^(array|alignat|alignedat|subarray)$/.test(name)) {
      const columns = this.#source.braced().match(/\|?[lcr]\|*/g);
      if (name.endsWith('array') && columns) align = columns.map(columnClass);
    }
    const lines = this.#lines(align);
    const style = /^(align|gather|split|equation|eqnarray|dcases|flalign|multline)/.test(name) ? { displaystyle: 'true' } : {};
    const spacing = /^(align|split|eqnarray|flalign)/.test(name) ? 'equations' : name;
    const made = mathml('mtable', { class: spacing, ...style }, ...lines);
    const fences = (text) => (text ? [fence(text)] : []);
    return kind.open || kind.close ? mathml('mrow', {}, ...fences(kind.open), made, ...fences(kind.close)) : made;
  }

  #lines(align) {
    const lines = [[]];
    /** Numbers of the lines below a rule. */
    const ruled = new Set();
    for (;;) {
      while (this.#source.take('\\hline')) ruled.add(lines.length - 1);
      const cell = this.#until((token) => ['&', '\\\\', '\\cr', '\\end'].includes(token));
      lines.at(-1).push(mathml('mtd', { class: align[lines.at(-1).length % align.length] }, ...cell));
      const token = this.#source.next();
      if (token === null) throw new SyntaxError('\\begin without \\end');
      if (token === '\\end') break;
      if (token === '&') continue;
      // The distance to the next row.
      if (this.#source.peek() === '[') this.#source.skip(['option']);
      lines.push([]);
    }
    this.#source.braced();
    const isEmpty = (cells) => cells.every((cell) => !cell.hasChildNodes());
    const isClosed = ruled.has(lines.length - 1);
    if (lines.length > 1 && isEmpty(lines.at(-1))) lines.pop();
    const rule = (at) => `${ruled.has(at) ? 'ruled' : ''} ${isClosed && at === lines.length - 1 ? 'closed' : ''}`;
    return lines.map((cells, at) => mathml('mtr', { class: rule(at).trim() }, ...cells));
  }

  get source() {
    return this.#source;
  }

  /** Another text as a part of this formula. */
  nested(text) {
    const parser = new Parser(new Source(text));
    parser.#depth = this.#depth + 1;
    return parser.rows();
  }

  /** Everything up to the end of the group, in a style. */
  rest(attributes) {
    const ends = (token) => ['}', '\\right', '\\end', '&', '\\\\', ']'].includes(token);
    return mathml('mstyle', attributes, ...this.#until(ends));
  }
}

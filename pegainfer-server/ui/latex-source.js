// The text of a formula as tokens: commands, numbers, and single characters.

/** Sizes of the fences that `\big` and its kind write. */
const SIZES = Object.entries({ big: '1.2em', Big: '1.8em', bigg: '2.4em', Bigg: '3em' });
export const BIG = new Map(['', 'l', 'r', 'm'].flatMap((side) => SIZES.map(([name, size]) => [name + side, size])));

/** Commands without a form here, and the arguments that are skipped with them. */
export const SILENT = new Map(
  Object.entries({
    nonumber: [], notag: [], hline: [], limits: [], nolimits: [], label: ['braces'], color: ['braces'], textcolor: ['braces'],
    mathop: [], mathbin: [], mathrel: [], mathord: [], mathopen: [], mathclose: [], mathpunct: [], mathinner: [], scriptstyle: [],
    scriptscriptstyle: [], allowbreak: [], ensuremath: [], strut: [], mathstrut: [], centering: [], hfill: [], normalsize: [],
    vspace: ['braces'], large: [], Large: [], small: [],
  }),
);

/** The character that an escape such as `\{` writes; undefined for other commands. */
export const escaped = (name) => ({ '{': '{', '}': '}', $: '$', '%': '%', '&': '&', '#': '#', _: '_', '|': '‖', '-': '' })[name];

const TOKEN = /\\(?:[a-zA-Z]+|[^])|\d+(?:[.,]\d+)*|\.\d+|[^]/uy;
const SPACE = /(?:\s|%[^\n]*(?:\n|$))*/y;

export class Source {
  #text;
  #at = 0;

  constructor(text) {
    this.#text = text;
  }

  /** The next token, which stays; null at the end. White space counts only in text. */
  peek() {
    const at = this.#at;
    const token = this.next();
    this.#at = at;
    return token;
  }

  /** Takes the next token. `single`: one digit of a number. */
  next(single = false) {
    this.#skipSpace();
    TOKEN.lastIndex = this.#at;
    const token = TOKEN.exec(this.#text)?.[0];
    if (token === undefined) return null;
    const taken = single && /^\d/.test(token) ? token[0] : token;
    this.#at += taken.length;
    return taken;
  }

  expect(token) {
    if (this.next() !== token) throw new SyntaxError(`${token} is missing`);
  }

  /** Takes `token` if it is next; returns whether it was. */
  take(token) {
    if (this.peek() !== token) return false;
    this.next();
    return true;
  }

  /** The text of a group in braces, as it is. */
  braced() {
    this.#skipSpace();
    if (this.#text[this.#at] !== '{') throw new SyntaxError('{ is missing');
    let depth = 0;
    for (let at = this.#at; at < this.#text.length; at += 1) {
      const char = this.#text[at];
      if (char === '\\') at += 1;
      else if (char === '{') depth += 1;
      else if (char === '}') depth -= 1;
      if (depth > 0) continue;
      const text = this.#text.slice(this.#at + 1, at);
      this.#at = at + 1;
      return text;
    }
    throw new SyntaxError('} is missing');
  }

  /** Skips the arguments of a command that has no form; returns its nodes, which are none. */
  skip(kinds) {
    for (const kind of kinds) {
      if (kind === 'braces') this.braced();
      else while (![']', null].includes(this.next()));
    }
    return [];
  }

  #skipSpace() {
    SPACE.lastIndex = this.#at;
    SPACE.exec(this.#text);
    this.#at = SPACE.lastIndex;
  }
}

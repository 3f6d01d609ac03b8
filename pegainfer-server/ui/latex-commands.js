// Commands of LaTeX with arguments of their own.

import { mathml } from './dom.js';
import { below, fence, operator, space, upright } from './latex-nodes.js';

/** Commands with arguments. */
export const COMMANDS = {
  frac: (parser) => mathml('mfrac', {}, parser.argument, parser.argument),
  dfrac: (parser) => mathml('mstyle', { displaystyle: 'true' }, COMMANDS.frac(parser)),
  cfrac: (parser) => COMMANDS.dfrac(parser),
  tfrac: (parser) => mathml('mstyle', { displaystyle: 'false' }, COMMANDS.frac(parser)),
  binom: (parser) => [fence('('), mathml('mfrac', { linethickness: '0' }, parser.argument, parser.argument), fence(')')],
  dbinom: (parser) => COMMANDS.binom(parser),
  tbinom: (parser) => COMMANDS.binom(parser),
  sqrt: (parser) => {
    const index = parser.option;
    return index ? mathml('mroot', {}, parser.argument, index) : mathml('msqrt', {}, parser.argument);
  },
  left: (parser) => parser.left(),
  begin: (parser) => parser.environment(),
  operatorname: (parser) => {
    const star = parser.source.take('*');
    const name = parser.source.braced().replace(/\\[,;: ]/g, ' ').replace(/\\(mathrm|text)|[{}]/g, '');
    return star ? below(name) : upright(name);
  },
  overset: (parser) => stacked(parser, 'mover'),
  stackrel: (parser) => stacked(parser, 'mover'),
  underset: (parser) => stacked(parser, 'munder'),
  overline: (parser) => mathml('mrow', { class: 'overlined' }, parser.argument),
  underline: (parser) => mathml('mrow', { class: 'underlined' }, parser.argument),
  boxed: (parser) => mathml('mrow', { class: 'boxed' }, parser.argument),
  fbox: (parser) => mathml('mtext', { class: 'boxed' }, parser.source.braced()),
  phantom: (parser) => mathml('mphantom', {}, parser.argument),
  not: (parser) => {
    const node = parser.argument;
    node.textContent += '\u0338';
    return node;
  },
  bmod: () => operator('mod', { lspace: '0.22em', rspace: '0.22em' }),
  mod: (parser) => [space(1), upright('mod'), space(0.33), parser.argument],
  pmod: (parser) => {
    const [gap, ...inner] = COMMANDS.mod(parser);
    return [gap, operator('(', { stretchy: 'false' }), ...inner, operator(')', { stretchy: 'false' })];
  },
  substack: (parser) => {
    const lines = parser.source.braced().split('\\\\');
    return mathml('mtable', {}, ...lines.map((line) => mathml('mtr', {}, mathml('mtd', {}, parser.nested(line)))));
  },
  tag: (parser) => [space(2), mathml('mtext', {}, `(${parser.source.braced()})`)],
  hspace: (parser) => space(Math.min(Math.max(Number.parseFloat(parser.source.braced()) || 0, -2), 10)),
  displaystyle: (parser) => parser.rest({ displaystyle: 'true' }),
  textstyle: (parser) => parser.rest({ displaystyle: 'false' }),
};

function stacked(parser, tag) {
  const script = parser.argument;
  return mathml(tag, {}, parser.argument, script);
}

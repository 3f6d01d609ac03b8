// The newest steps of the engine against the server's ledger, and their time by op. Only if the server has a ledger and the key may
// see its steps.

import { opTimes, steps } from './api.js';
import { element, svg } from './dom.js';
import { milliseconds } from './words.js';

/** Number of steps that are shown. */
const STEPS = 150;
/** Measured over predicted time at the full height; a longer bar is cut. */
const TOP = 3;
/** Ops that are named; the others are one. */
const OPS = 5;
const WIDTH = 300;
const HEIGHT = 48;
const BAR = 14;

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];

/** One bar for each step, as high as its time over the prediction; the line is 1. */
function strip(shown) {
  const width = WIDTH / STEPS;
  const left = WIDTH - shown.length * width;
  const bars = shown.map((step, at) => {
    const ratio = step.us / step.predicted_us;
    const height = Math.max(1, (Math.min(ratio, TOP) / TOP) * HEIGHT);
    const box = { x: (left + at * width).toFixed(1), y: HEIGHT - height, width, height, class: `step ${step.kind}` };
    const load = `${step.decode_rows} decode, ${step.prefill_tokens} prefill tokens`;
    const text = `step ${step.step} (${load}): ${milliseconds(step.us / 1000)}, ${ratio.toFixed(2)} of predicted`;
    return svg('rect', box, svg('title', {}, text));
  });
  const y = HEIGHT - HEIGHT / TOP;
  return [...bars, svg('line', { x1: 0, y1: y, x2: WIDTH, y2: y, class: 'predicted' })];
}

/** The ops with most time, and the sum of the others, as parts of the whole. */
function parts(times) {
  const sorted = Object.entries(times).sort(([, a], [, b]) => b - a);
  const whole = sorted.reduce((sum, [, time]) => sum + time, 0);
  if (!whole) return [];
  const others = sorted.slice(OPS).reduce((sum, [, time]) => sum + time, 0);
  const named = [...sorted.slice(0, OPS), ...(others > 0 ? [['others', others]] : [])];
  return named.map(([op, time]) => [op, time / whole]);
}

export class StepStrip {
  #root;
  #figure = null;
  #value = element('strong');
  #scale = element('span', { className: 'scale' }, `max ${TOP}`);
  #strip = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  #bar = svg('svg', { viewBox: `0 0 ${WIDTH} ${BAR}`, preserveAspectRatio: 'none', 'aria-hidden': 'true', class: 'ops' });
  #ops = element('p', { className: 'note ops' });
  /** A key without access to the steps. */
  #refused = null;

  constructor(root) {
    this.#root = root;
  }

  /** Fetches and draws the newest steps. `watched`: whether the server compares them with a ledger. */
  async poll(key, watched) {
    if (!watched || this.#refused === key) return this.#show(false);
    let shown;
    let times;
    try {
      [shown, times] = await Promise.all([steps(key, STEPS), opTimes(key, STEPS)]);
    } catch {
      // The steps are for admins; the rest of the panel does not depend on them.
      this.#refused = key;
      return this.#show(false);
    }
    const predicted = shown.filter((step) => step.predicted_us);
    this.#show(predicted.length > 0);
    if (!predicted.length) return;
    const ratio = median(predicted.map((step) => step.us / step.predicted_us));
    this.#value.textContent = `${ratio.toFixed(2)} of predicted`;
    this.#strip.replaceChildren(...strip(predicted));
    this.#drawOps(parts(times));
  }

  #drawOps(ops) {
    let x = 0;
    const shapes = ops.map(([op, part], at) => {
      const box = { x, y: 0, width: part * WIDTH, height: BAR, class: `op op-${at}` };
      x += part * WIDTH;
      return svg('rect', box, svg('title', {}, `${op} ${(part * 100).toFixed(0)} %`));
    });
    this.#bar.replaceChildren(...shapes);
    this.#ops.textContent = ops.map(([op, part]) => `${op} ${(part * 100).toFixed(0)} %`).join(', ');
  }

  #show(visible) {
    if (visible && !this.#figure) {
      const meaning = 'Time of the newest steps over the prediction of the ledger, by kind; below it, their time by op';
      const names = ['decode', 'prefill', 'mixed'].map((kind) => element('span', { className: `kind ${kind}` }, kind));
      const caption = element('figcaption', {}, element('span', { title: meaning }, 'Steps'), this.#value, this.#scale);
      const legend = element('p', { className: 'note kinds' }, ...names);
      this.#figure = element('figure', { id: 'steps' }, caption, this.#strip, legend, this.#bar, this.#ops);
      this.#root.append(this.#figure);
    }
    if (this.#figure) this.#figure.hidden = !visible;
  }
}

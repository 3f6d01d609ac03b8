// Live charts: latencies of the responses, and the server's metrics, polled every second. A chart appears when it has something
// to draw.

import { metrics } from './api.js';
import { element, svg } from './dom.js';
import { StepStrip } from './steps.js';
import { milliseconds } from './words.js';

/** Number of responses that a bar chart shows. */
const RESPONSES = 30;
/** Number of seconds that a line chart shows. */
const SECONDS = 60;
const WIDTH = 300;
const HEIGHT = 48;

/** A chart with a title, its latest value as text, and a drawing that scales with the panel. */
class Figure {
  #value = element('strong', {}, '–');
  #scale = element('span', { className: 'scale' });
  #root;
  #drawing = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' });

  constructor(root, title, meaning) {
    const caption = element('figcaption', {}, element('span', { title: meaning }, title), this.#value, this.#scale);
    this.#root = element('figure', { hidden: true }, caption, this.#drawing);
    root.append(this.#root);
  }

  get isShown() {
    return !this.#root.hidden;
  }

  /** `value`: the latest value as text; `scale`: the value at the drawing's full height. */
  draw(value, scale, ...shapes) {
    this.#value.textContent = value;
    this.#scale.textContent = scale;
    this.#drawing.replaceChildren(...shapes);
    this.#root.hidden = false;
  }
}

/** Bars, one for each response, from `times` in milliseconds. */
function drawBars(figure, times) {
  if (!times.length) return;
  const top = Math.max(...times);
  const step = WIDTH / RESPONSES;
  const bars = times.map((time, at) => {
    // A fast server's tokens may all come within the resolution of the browser's clock.
    const height = Math.max(1, top > 0 ? (time / top) * HEIGHT : 0);
    const box = { x: at * step + 1, y: HEIGHT - height, width: step - 2, height, class: 'bar' };
    return svg('rect', box, svg('title', {}, milliseconds(time)));
  });
  figure.draw(milliseconds(times.at(-1)), `max ${milliseconds(top)}`, ...bars);
}

/** Points of a polyline that ends at the right edge. */
function points(values, top) {
  const step = WIDTH / (SECONDS - 1);
  const left = WIDTH - (values.length - 1) * step;
  // One pixel is left above and below for the width of the line.
  const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 2);
  return values.map((value, at) => `${(left + at * step).toFixed(1)},${y(value).toFixed(1)}`);
}

const line = (values, top, name) => svg('polyline', { points: points(values, top).join(' '), class: name });

function area(values, top) {
  const line = points(values, top);
  const left = line[0].split(',')[0];
  return svg('polygon', { points: `${left},${HEIGHT} ${line.join(' ')} ${WIDTH},${HEIGHT}`, class: 'area' });
}

function append(list, value, limit) {
  list.push(value);
  if (list.length > limit) list.shift();
}

/** Draws one or two lines, the first solid and the second dashed, on a scale from 0 to their maximum, at least `minimum`. */
function drawLines(figure, value, unit, minimum, first, second = []) {
  if (!figure.isShown && ![...first, ...second].some((each) => each > 0)) return;
  const top = Math.max(minimum, ...first, ...second);
  const shapes = [...(second.length ? [line(second, top, 'second')] : [area(first, top)]), line(first, top, 'first')];
  figure.draw(value, `max ${unit(Math.max(...first, ...second))}`, ...shapes);
}

const percent = (value) => `${(value * 100).toFixed(1)} %`;
const times = (value) => `${value.toFixed(1)} × mean`;
const rate = (value) => value.toFixed(value < 10 ? 1 : 0);

export class Charts {
  #ttft;
  #tpot;
  #requests;
  #throughput;
  #kv;
  #prefix;
  /** Only if the server drafts. */
  #drafts = null;
  /** Only if the model has experts. */
  #experts = null;
  #steps;
  #root;
  #note;
  #times = { ttft: [], tpot: [] };
  #gauges = { running: [], waiting: [], generated: [], prefilled: [], kv: [], hits: [], accepted: [], ratios: [] };
  /** Counters of the last minute's polls, oldest first, with the time of each. */
  #polls = [];

  /** `note` is shown while there is nothing to draw. */
  constructor(root, note) {
    this.#root = root;
    this.#note = note;
    this.#steps = new StepStrip(root);
    this.#ttft = new Figure(root, 'TTFT', 'Time to first token of a response, measured in the browser');
    this.#tpot = new Figure(root, 'TPOT', 'Time per output token after the first, measured by the server');
    this.#requests = new Figure(root, 'Requests', 'Running (solid) and waiting (dashed), the last minute');
    this.#throughput = new Figure(root, 'Tokens/s', 'Output (solid) and prompt tokens (dashed) per second, the last minute');
    this.#kv = new Figure(root, 'KV cache', 'Percentage of the KV blocks that requests hold, the last minute');
    this.#prefix = new Figure(root, 'Prefix cache', 'Percentage of the prompt tokens of the last minute that were cached');
  }

  /** Adds the latencies of one response, in milliseconds; null where there were too few tokens. */
  addResponse({ ttft, tpot }) {
    if (ttft !== null) append(this.#times.ttft, ttft, RESPONSES);
    if (tpot !== null) append(this.#times.tpot, tpot, RESPONSES);
    drawBars(this.#ttft, this.#times.ttft);
    drawBars(this.#tpot, this.#times.tpot);
    this.#showNote();
  }

  #showNote() {
    this.#note.hidden = this.#root.querySelector('figure:not([hidden])') !== null;
  }

  /** Polls the server's metrics once; returns whether no engine makes progress. Throws an `ApiError` if they cannot be fetched. */
  async poll(key) {
    const samples = await metrics(key);
    const { running, waiting, generated, prefilled, kv, hits, accepted, ratios } = this.#gauges;
    append(running, samples.get('vllm:num_requests_running') ?? 0, SECONDS);
    append(waiting, samples.get('vllm:num_requests_waiting') ?? 0, SECONDS);
    const engines = samples.get('engines') ?? 1;
    append(kv, (samples.get('vllm:kv_cache_usage_perc') ?? 0) / engines, SECONDS);
    // Only a server that drafts has these counters.
    if (!this.#drafts && samples.has('vllm:spec_decode_num_draft_tokens_total')) {
      this.#drafts = new Figure(this.#root, 'Drafts', 'Percentage of the draft tokens of the last minute that were accepted');
    }
    // Only a model with experts has this histogram.
    if (!this.#experts && samples.has('pegainfer:expert_load_ratio_count')) {
      this.#experts = new Figure(this.#root, 'Experts', 'Tokens of the most loaded expert over the mean, the last minute');
    }
    this.#count(samples);
    const now = (values) => values.at(-1);
    const healthy = samples.get('pegainfer:engines_healthy') ?? engines;
    const on = engines === 1 ? '' : ` on ${healthy === engines ? '' : `${healthy} of `}${engines} engines`;
    drawLines(this.#requests, `${now(running)} running, ${now(waiting)} waiting${on}`, String, 1, running, waiting);
    const rates = `${rate(now(generated))} out, ${rate(now(prefilled))} in`;
    drawLines(this.#throughput, rates, rate, 1, generated, prefilled);
    // The chart has its own scale: a small percentage would be a flat line on a scale to 100 %.
    drawLines(this.#kv, percent(now(kv)), percent, 0.01, kv);
    drawLines(this.#prefix, `${percent(now(hits))} hits`, percent, 0.01, hits);
    if (this.#drafts) drawLines(this.#drafts, `${percent(now(accepted))} accepted`, percent, 0.01, accepted);
    if (this.#experts && ratios.length) drawLines(this.#experts, `most loaded ${times(now(ratios))}`, times, 1, ratios);
    // Only a server with a ledger has this counter.
    await this.#steps.poll(key, samples.has('pegainfer:step_predicted_seconds_total'));
    this.#showNote();
    return healthy === 0;
  }

  /** Adds the rates since the last poll, and the hits of the last minute. */
  #count(samples) {
    const total = (name) => samples.get(`vllm:${name}_total`) ?? 0;
    const poll = {
      time: performance.now() / 1000,
      generated: total('generation_tokens'),
      prefilled: total('prompt_tokens'),
      queries: total('prefix_cache_queries'),
      hits: total('prefix_cache_hits'),
      drafts: total('spec_decode_num_draft_tokens'),
      accepted: total('spec_decode_num_accepted_tokens'),
      ratioSum: samples.get('pegainfer:expert_load_ratio_sum') ?? 0,
      ratioCount: samples.get('pegainfer:expert_load_ratio_count') ?? 0,
    };
    // A server that was started again counts from 0.
    if (this.#polls.at(-1)?.generated > poll.generated) this.#polls = [];
    const last = this.#polls.at(-1) ?? poll;
    append(this.#polls, poll, SECONDS);
    const since = (start, name) => poll[name] - start[name];
    const perSecond = (name) => since(last, name) / Math.max(since(last, 'time'), 0.001);
    append(this.#gauges.generated, perSecond('generated'), SECONDS);
    append(this.#gauges.prefilled, perSecond('prefilled'), SECONDS);
    const [first] = this.#polls;
    const share = (part, whole) => (since(first, whole) > 0 ? since(first, part) / since(first, whole) : 0);
    append(this.#gauges.hits, share('hits', 'queries'), SECONDS);
    append(this.#gauges.accepted, share('accepted', 'drafts'), SECONDS);
    if (since(first, 'ratioCount') > 0) append(this.#gauges.ratios, share('ratioSum', 'ratioCount'), SECONDS);
  }
}

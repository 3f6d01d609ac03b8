// The served models: their names in the header, the choice among several, and prompts to begin with.

import { byId, element } from './dom.js';
import { BROWSER, recall, remember } from './storage.js';
import { bytes } from './words.js';

const STORE = 'pegainfer.model';
/** Weights below this size, in bytes, are of a model that only shows that the server works. */
const TINY = 100e6;
const PROMPTS = [
  'Explain how TCP notices lost packets.',
  'Write a Python function that finds duplicate files in a folder.',
  'Solve x² − 5x + 6 = 0 step by step.',
  'Compare Rust and Go in a table.',
];
/** Prompts that the bundled model was trained for. */
const TINY_PROMPTS = ['What is the capital of France?', 'Tell me a story about a girl named Lily.'];

export class Models {
  #cards = [];
  /** The model of this chat, or the one that the user has last chosen; null for the first one. */
  #chosen = recall(BROWSER, STORE, null);
  /** Whether an earlier turn of this chat names it. */
  #isKept = false;
  #choice = byId('model-choice');
  #suggest;

  /** `chosen` is called when the user chooses a model, `suggest(prompt)` when a suggested prompt. */
  constructor(chosen, suggest) {
    this.#suggest = suggest;
    this.#choice.addEventListener('change', () => {
      this.#chosen = this.#choice.value;
      this.#isKept = false;
      remember(BROWSER, STORE, this.#chosen);
      this.#describe();
      chosen();
    });
  }

  /** The card of the model that is asked; undefined before the server has told. */
  get card() {
    return this.#cards.find(({ id }) => id === this.#chosen) ?? this.#cards[0];
  }

  /** Name of the model that is asked; undefined before the server has told. */
  get name() {
    return this.card?.id;
  }

  /** True if the model that is asked reads images. */
  get readsImages() {
    return this.card?.input_modalities?.includes('image') ?? false;
  }

  /** The name to keep with a chat. */
  get chosen() {
    return this.#chosen ?? this.name ?? null;
  }

  /** Chooses the model of a chat; null for the one of new chats. */
  choose(name) {
    this.#isKept = name !== null;
    this.#chosen = name ?? recall(BROWSER, STORE, null);
    this.#describe();
  }

  /** Takes the server's list. */
  set cards(cards) {
    this.#cards = cards;
    this.#describe();
  }

  #describe() {
    if (!this.card) return;
    this.#choice.hidden = this.#cards.length < 2;
    const options = this.#cards.map(({ id, state }) => {
      const note = typeof state === 'string' && state !== 'loaded' ? ` (${state})` : '';
      return element('option', { value: id }, `${id}${note}`);
    });
    const text = (all) => [...all].map((option) => option.text).join('\n');
    if (text(options) !== text(this.#choice.options)) this.#choice.replaceChildren(...options);
    this.#choice.value = this.name;
    const gone = this.#isKept && this.#chosen !== this.name ? `${this.#chosen} is not served now. ` : '';
    const name = this.#cards.length < 2 ? `${this.name}, ` : '';
    say('model', `${gone}${name}${facts(this.card)}`);
    byId('model').title = byId('model').textContent;
    const files = this.readsImages ? 'images or text files' : 'text files';
    Object.assign(byId('attach'), { ariaLabel: `Attach ${files}`, title: `Attach ${files}` });
    this.#welcome();
  }

  #welcome() {
    const isTiny = this.card.weight_bytes < TINY;
    const note = isTiny ? `${this.name} is a tiny model: it shows that the server works, and knows little.` : '';
    say('welcome-model', note);
    say('welcome-title', `Ask ${this.name} something`);
    const prompts = isTiny ? TINY_PROMPTS : PROMPTS;
    if (byId('suggestions').dataset.first === prompts[0]) return;
    byId('suggestions').dataset.first = prompts[0];
    byId('suggestions').replaceChildren(...prompts.map((prompt) => element('li', {}, this.#suggestion(prompt))));
  }

  #suggestion(prompt) {
    const button = element('button', { type: 'button' }, prompt);
    button.addEventListener('click', () => this.#suggest(prompt));
    return button;
  }
}

/** Device, weights and context of a model. */
function facts({ family, device, weight_bytes: size, max_model_len: context, lora, error }) {
  const weights = size ? `${bytes(size)} of weights` : '';
  const placed = [weights, device && `on ${device}`].filter(Boolean).join(' ');
  const adapter = lora && `adapter of rank ${lora.rank}`;
  const length = context && `context ${context.toLocaleString('en')}`;
  return [error, family, adapter, placed, length].filter(Boolean).join(', ');
}

/** Unchanged text is not set, because screen readers would read it again. */
export function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

// The page: connects the parts, and the keyboard.

import { model } from './api.js';
import { Charts } from './charts.js';
import { Chat } from './chat.js';
import { byId } from './dom.js';
import { Settings } from './settings.js';
import { TokenCard } from './tokens.js';

/** Milliseconds between two looks at the server's gauges. */
const POLL = 1000;
/** Pixels from the end within which the view follows a growing answer. */
const NEAR_END = 80;

/** Where panel.css lets the panel cover the conversation. */
const narrow = matchMedia('(max-width: 899px)');

/** The card of the served model; null until the server has told. */
let served = null;
const log = byId('log');
const prompt = byId('prompt');
const settings = new Settings(byId('settings'), () => {
  // Asked again with the new key.
  served = null;
});
const chat = new Chat(log, settings);
const card = new TokenCard(byId('card'), log);
const charts = new Charts(byId('charts'));

/** Keeps the figures and the model's name up to date; says so when the server does not answer. */
async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await look();
    } catch (error) {
      served = null;
      describe(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

async function look() {
  if (!served) {
    served = await model(settings.key);
    describe(`${served.id}, context ${served.max_model_len.toLocaleString('en')}`);
  }
  await charts.poll(settings.key);
}

/** Beside the title. The same words again would be read out again. */
function describe(text) {
  if (byId('model').textContent !== text) byId('model').textContent = text;
}

async function send() {
  const text = prompt.value.trim();
  if (!text || chat.isRunning) return;
  if (!settings.isValid) {
    openPanel(true);
    return;
  }
  prompt.value = '';
  fitPrompt();
  const answering = chat.send(served?.id, text);
  log.scrollTop = log.scrollHeight;
  showState('Answering …');
  refocus();
  const { times, outcome } = await answering;
  if (outcome === 'cleared') return;
  charts.addAnswer(times);
  showState({ done: 'Answered', stopped: 'Stopped', failed: 'Failed' }[outcome]);
  refocus();
  if (outcome === 'failed' && !prompt.value) {
    prompt.value = text;
    fitPrompt();
  }
}

/** Shows what can be done now, and how the last answer went. */
function showState(progress) {
  byId('send').hidden = chat.isRunning;
  byId('stop').hidden = !chat.isRunning;
  byId('welcome').hidden = log.hasChildNodes();
  byId('progress').textContent = progress;
}

/** Goes on in the prompt after a button that has vanished under the finger. */
function refocus() {
  if ([byId('send'), byId('stop'), document.body].includes(document.activeElement)) prompt.focus();
}

/** As high as its text, up to a limit that the style sets. */
function fitPrompt() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

/** On a wide window the panel is always there; on a narrow one it covers the conversation, which then rests. */
function openPanel(open) {
  cover(open);
  if (open) (byId('settings').querySelector(':invalid') ?? byId('panel-close')).focus();
  else byId('panel-toggle').focus();
}

function cover(open) {
  document.body.classList.toggle('panel-open', open);
  byId('panel-toggle').setAttribute('aria-expanded', open);
  document.querySelector('main').inert = open && narrow.matches;
}

/** Keeps the end of a growing answer in view, unless the reader has scrolled away from it. */
function follow() {
  let isNear = true;
  let isDue = false;
  log.addEventListener('scroll', () => {
    isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  });
  const scroll = () => {
    isDue = false;
    log.scrollTop = log.scrollHeight;
  };
  // Once a frame: to ask for the height after every token would lay the whole answer out each time.
  const grown = () => {
    if (!isNear || isDue) return;
    isDue = true;
    requestAnimationFrame(scroll);
  };
  new MutationObserver(grown).observe(log, { childList: true, subtree: true, characterData: true });
}

byId('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener('input', fitPrompt);
prompt.addEventListener('keydown', (event) => {
  // While an input method composes a word, Enter belongs to it.
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape') return;
  if (card.isOpen) card.hide();
  else if (document.querySelector('main').inert) openPanel(false);
  else chat.stop();
});
byId('stop').addEventListener('click', () => chat.stop());
byId('new-chat').addEventListener('click', () => {
  chat.clear();
  showState('');
  prompt.focus();
});
byId('panel-toggle').addEventListener('click', () => openPanel(true));
byId('panel-close').addEventListener('click', () => openPanel(false));
narrow.addEventListener('change', () => cover(false));

follow();
for (const times of chat.times) charts.addAnswer(times);
showState('');
log.scrollTop = log.scrollHeight;
// On a phone the keyboard would cover half of the page at once.
if (!narrow.matches) prompt.focus();
watch();

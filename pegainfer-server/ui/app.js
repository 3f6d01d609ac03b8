// The web UI: connects its modules, and handles the keyboard.

import { model } from './api.js';
import { Attachments, withFiles } from './attachments.js';
import { Charts } from './charts.js';
import { Chat } from './chat.js';
import { byId, chooseFiles } from './dom.js';
import { Settings } from './settings.js';
import { TokenCard } from './tokens.js';
import { download, fromJson, toJson, toMarkdown } from './transcript.js';

/** Milliseconds between two polls of the server's metrics. */
const POLL = 1000;
/** Distance from the end, in pixels, within which the view follows a growing response. */
const NEAR_END = 80;

/** Window width below which panel.css lets the panel cover the conversation. */
const narrow = matchMedia('(max-width: 899px)');

/** The card of the served model; null until it was fetched. */
let served = null;
const log = byId('log');
const prompt = byId('prompt');
const settings = new Settings(byId('settings'), () => {
  // Fetched again with the new key.
  served = null;
});
const chat = new Chat(log, settings, submit);
const card = new TokenCard(byId('card'), log);
const charts = new Charts(byId('charts'));
const attachments = new Attachments();

/** Keeps the charts and the model's name up to date; shows an error if the server does not respond. */
async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await refresh();
    } catch (error) {
      served = null;
      describe(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

async function refresh() {
  if (!served) {
    served = await model(settings.key);
    describe(`${served.id}, context ${served.max_model_len.toLocaleString('en')}`);
  }
  await charts.poll(settings.key);
}

/** Text next to the title. Unchanged text is not set, because screen readers would read it again. */
function describe(text) {
  if (byId('model').textContent !== text) byId('model').textContent = text;
}

/** Sends the text of the composer with the attached files. */
function send() {
  const text = withFiles(prompt.value.trim(), attachments.files);
  if (!text || !isReady()) return;
  prompt.value = '';
  attachments.clear();
  fitPrompt();
  submit(text);
}

/** Whether a prompt can be sent; shows the setting that prevents it. */
function isReady() {
  if (chat.isRunning) return false;
  if (settings.isValid) return true;
  openPanel(true);
  return false;
}

/** Sends `text`, instead of the turn of `view` and those after it if there is one. */
async function submit(text, view) {
  if (!isReady()) return;
  const running = chat.send(served?.id, text, view);
  log.scrollTop = log.scrollHeight;
  showState('Generating …');
  refocus();
  const { times, outcome } = await running;
  if (outcome === 'cleared') return;
  charts.addResponse(times);
  showState({ done: 'Done', stopped: 'Stopped', failed: 'Failed' }[outcome]);
  refocus();
  // The form of an edited message keeps its text itself.
  if (outcome === 'failed' && !view && !prompt.value) {
    prompt.value = text;
    fitPrompt();
  }
}

/** Offers the conversation as a download, in the form that `write` makes. */
function save(name, type, write) {
  download(name, type, write({ model: served?.id ?? 'a model', system: settings.system, turns: chat.turns }));
}

/** Shows the conversation of a file instead of this one. */
async function load(file) {
  try {
    const { system, turns } = fromJson(await file.text());
    chat.load(turns);
    settings.system = system;
    showState('Imported');
    byId('import-error').textContent = '';
  } catch (error) {
    byId('import-error').textContent = `${file.name} cannot be imported. ${error.message}`;
  }
}

/** Shows the available buttons, and the outcome of the last response. */
function showState(progress) {
  document.body.classList.toggle('generating', chat.isRunning);
  byId('send').hidden = chat.isRunning;
  byId('stop').hidden = !chat.isRunning;
  byId('welcome').hidden = log.hasChildNodes();
  byId('progress').textContent = progress;
}

/** Moves the focus to the prompt if the focused button was hidden. */
function refocus() {
  if ([byId('send'), byId('stop'), document.body].includes(document.activeElement)) prompt.focus();
}

/** Fits the height to the text, up to a limit that the style sets. */
function fitPrompt() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

/** On a wide window the panel is always visible; on a narrow one it covers the conversation, which is then inert. */
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

/** Keeps the end of a growing response in view, unless the user has scrolled away from it. */
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
  // Once a frame: reading the height after every token would lay out the whole response each time.
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
  // While an input method composes a word, Enter confirms the word.
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
byId('export-markdown').addEventListener('click', () => save('conversation.md', 'text/markdown', toMarkdown));
byId('export-json').addEventListener('click', () => save('conversation.json', 'application/json', toJson));
chooseFiles(byId('import'), byId('import-chooser'), ([file]) => load(file));
byId('panel-toggle').addEventListener('click', () => openPanel(true));
byId('panel-close').addEventListener('click', () => openPanel(false));
narrow.addEventListener('change', () => cover(false));

follow();
for (const { times } of chat.turns) charts.addResponse(times);
showState('');
log.scrollTop = log.scrollHeight;
// On a phone, the keyboard would cover half of the screen.
if (!narrow.matches) prompt.focus();
watch();

// The web UI: connects its modules, and handles the keyboard.

import { models as fetchModels } from './api.js';
import { Attachments, withFiles } from './attachments.js';
import { Charts } from './charts.js';
import { Chat } from './chat.js';
import { CurrentChat } from './current.js';
import { byId, chooseFiles } from './dom.js';
import { Drawers } from './drawers.js';
import { follow } from './follow.js';
import { History } from './history.js';
import { fillIcons } from './icons.js';
import { Key } from './key.js';
import { Models, say } from './models.js';
import { Settings } from './settings.js';
import { openStore } from './store.js';
import { TokenCard } from './tokens.js';
import { download, fromJson, toJson, toMarkdown } from './transcript.js';

/** Milliseconds between two polls of the server's metrics. */
const POLL = 1000;
/** Number of polls between two of the list of models, which changes when adapters are loaded. */
const MODEL_POLLS = 20;

/** A key with which the server did not list its models; null if there is none. */
let refusedKey = null;
let sinceModels = MODEL_POLLS;
/** Whether the last poll failed. */
let isDown = false;

fillIcons();
const log = byId('log');
const prompt = byId('prompt');
const drawers = new Drawers();
const key = new Key(() => {
  refusedKey = null;
  sinceModels = MODEL_POLLS;
});
const settings = new Settings(byId('settings'), () => current.touch());
const models = new Models(() => current.touch(), (suggestion) => submit({ prompt: suggestion, images: [] }));
const chat = new Chat(log, settings, key, submit, () => current.touch());
const card = new TokenCard(byId('card'), log);
const charts = new Charts(byId('charts'), byId('live-note'));
const attachments = new Attachments(models);
const store = await openStore();
const current = new CurrentChat(
  store,
  () => ({ model: models.chosen, system: settings.system, turns: chat.turnsSoFar }),
  (error) => (error ? say('attach-error', error) : history.refresh()),
);
const history = new History(store, open, removed, (summaries) => current.rename(summaries));

/** Keeps the charts and the models up to date; tells when the server does not respond. */
async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await refresh();
    } catch (error) {
      isDown = true;
      sinceModels = MODEL_POLLS;
      say('outage', `${error.message} The web UI tries again every second.`);
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

async function refresh() {
  sinceModels += 1;
  if (sinceModels > MODEL_POLLS && refusedKey !== key.value) await refreshModels();
  const stuck = await charts.poll(key.value);
  if (isDown && byId('progress').textContent === 'Failed') showState('The server is back');
  isDown = false;
  say('outage', stuck ? 'The engine makes no progress: responses do not come now.' : '');
}

async function refreshModels() {
  try {
    models.cards = await fetchModels(key.value);
    sinceModels = 0;
  } catch (error) {
    if (error.status !== 401) throw error;
    refusedKey = key.value;
    say('model', 'An API key is needed');
    key.askAgain();
  }
}

/** Sends the text of the composer with the attached files. */
function send() {
  const message = { prompt: withFiles(prompt.value.trim(), attachments.files), images: attachments.images };
  if (!(message.prompt || message.images.length) || !isReady()) return;
  say('attach-error', attachments.refusal);
  if (attachments.refusal) return;
  prompt.value = '';
  attachments.clear();
  fitPrompt();
  submit(message);
}

/** Whether a prompt can be sent; shows the setting that prevents it. */
function isReady() {
  if (chat.isRunning) return false;
  if (settings.isValid) return true;
  drawers.open('panel', byId('settings').querySelector(':invalid'));
  settings.report();
  return false;
}

/** Sends `message`, `{prompt, images}`, instead of the turn of `view` and those after it if there is one. */
async function submit(message, view) {
  if (!isReady()) return;
  const running = chat.send(models.name, message, view);
  log.scrollTop = log.scrollHeight;
  showState('Generating …');
  current.save();
  refocus();
  const { times, outcome, status } = await running;
  if (outcome === 'cleared') return;
  current.save();
  charts.addResponse(times);
  // The request may have loaded its model.
  sinceModels = MODEL_POLLS;
  showState({ done: 'Done', stopped: 'Stopped', failed: 'Failed' }[outcome]);
  refocus();
  if (outcome !== 'failed') return;
  if (status === 401 && (await key.askAgain())) {
    if (prompt.value === message.prompt) prompt.value = '';
    submit(message, view);
    return;
  }
  // The form of an edited message keeps its text itself.
  if (!view && !prompt.value) {
    prompt.value = message.prompt;
    attachments.images = message.images;
    fitPrompt();
  }
}

/** Begins a new chat. */
function begin() {
  leave();
  current.begin();
  settings.system = settings.ownSystem;
  models.choose(null);
  history.current = current.id;
  showState('');
}

/** A chat was deleted: if it is the one that is shown, a new one begins, and nothing of it is saved again. */
function removed(id) {
  if (id !== current.id) return;
  current.begin();
  begin();
}

/** Another tab has changed a chat. If it is the one that is shown, its new turns are shown: they would be overwritten. */
async function changed(id) {
  history.refresh();
  if (id !== current.id || chat.isRunning) return;
  const stored = await store.get(id);
  if (stored && !chat.isRunning && id === current.id) show(stored);
}

/** Shows a chat of the list. */
async function open(id) {
  if (id !== current.id) {
    const stored = await store.get(id);
    if (!stored) return history.refresh();
    leave();
    show(stored);
  }
  if (drawers.closeCover()) log.focus();
  else if (!drawers.isNarrow) prompt.focus();
}

/** Saves the chat that is shown, with the part of a response that has come, and stops it. */
function leave() {
  current.flush();
  chat.clear();
}

function show({ system, turns, ...summary }) {
  current.begin(summary);
  chat.load(turns);
  settings.system = system;
  models.choose(summary.model);
  history.current = summary.id;
  showState('');
  log.scrollTop = log.scrollHeight;
}

/** Offers the conversation as a download, in the form that `write` makes. */
function save(name, type, write) {
  download(name, type, write({ model: models.name ?? 'a model', system: settings.system, turns: chat.turns }));
}

/** Shows the conversation of a file as a new chat. */
async function load(file) {
  try {
    const { system, turns } = fromJson(await file.text());
    begin();
    chat.load(turns);
    settings.system = system;
    await current.save();
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
  prompt.style.height = `${prompt.scrollHeight}px`;
}

byId('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener('input', fitPrompt);
prompt.addEventListener('keydown', (event) => {
  // While an input method composes a word, Enter confirms the word. Keyboards on screens have no Shift+Enter.
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing || matchMedia('(hover: none)').matches) return;
  event.preventDefault();
  send();
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || byId('key-dialog').open) return;
  if (card.isOpen) card.hide();
  else if (!drawers.closeCover()) chat.stop();
});
byId('stop').addEventListener('click', () => chat.stop());
byId('new-chat').addEventListener('click', () => {
  begin();
  prompt.focus();
});
byId('export-markdown').addEventListener('click', () => save('conversation.md', 'text/markdown', toMarkdown));
byId('export-json').addEventListener('click', () => save('conversation.json', 'application/json', toJson));
byId('remove-all').addEventListener('click', () => {
  drawers.open('chats', byId('chat-search'));
  history.removeAll();
});
chooseFiles(byId('import'), byId('import-chooser'), ([file]) => load(file));
document.addEventListener('visibilitychange', () => current.flush());
window.addEventListener('pagehide', () => current.flush());
store.watch(changed);

follow(log);
const last = CurrentChat.last && (await store.get(CurrentChat.last));
if (last) show(last);
else begin();
await history.refresh();
// On a phone, the keyboard would cover half of the screen.
if (!drawers.isNarrow) prompt.focus();
watch();

//! Loads and unloads models, on threads of their own: both block.

use super::entry::{Entry, State};
use super::error::LoadError;
use super::lease::Lease;
use super::model::{Model, Text};
use super::spec::{Prepared, Started, TextSide};
use super::table::{Need, Next, Table};
use super::{ModelId, Models};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Interval between checks whether a waiting client has left.
const CHECKED: Duration = Duration::from_millis(50);

/// What stays of a model that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// Nothing.
    Unload,
    /// Its text side; its weights stay in the page cache, as long as the system has memory for them.
    Sleep,
}

/// Those who wait for a model.
type Waiters = Vec<(oneshot::Sender<Result<Lease, LoadError>>, Lease)>;

impl Models {
    /// Loads model `id` on a thread. `text`: what it kept while it slept.
    pub(super) fn start_loading(self: &Arc<Self>, id: usize, text: Option<Box<Text>>) {
        let models = self.clone();
        let run = move || {
            let load = AssertUnwindSafe(|| models.load_blocking(id, text));
            if let Err(error) = catch_unwind(load).unwrap_or_else(|_| Err(LoadError::stopped())) {
                models.fail(id, error);
            }
        };
        if let Err(error) = thread::Builder::new().name("model-loader".into()).spawn(run) {
            self.fail(id, LoadError::Busy(format!("the system has no thread left: {error}")));
        }
    }

    fn load_blocking(self: &Arc<Self>, id: usize, text: Option<Box<Text>>) -> Result<(), LoadError> {
        let asked = Instant::now();
        let spec = self.table().entries[id].spec.clone();
        let name = spec.names[0].clone();
        let loader = spec.loader.ok_or_else(|| LoadError::Refused(format!("the model {name} cannot be loaded")))?;
        let failed = |error: anyhow::Error| LoadError::Failed(format!("the model {name} cannot be loaded: {error:#}"));
        let Prepared { bytes, text, start } = loader.prepare(text).map_err(failed)?;
        let turn = Turn::begin(self, id);
        let Some(evicted) = self.make_place(id, bytes, &name)? else {
            self.abandon(id, text);
            return Ok(());
        };
        let loading = Instant::now();
        let started = start().and_then(|started| Ok((text.finish(&started.engine, self.trial.clone())?, started)));
        let (text, Started { engine, adapters, kv_events, placement, summary }) = match started {
            Ok(started) => started,
            Err(error) => {
                drop(turn);
                // A load that fails leaves everything as it was.
                self.bring_back(&evicted);
                return Err(failed(error));
            }
        };
        let (took, waited) = (loading.elapsed(), asked.elapsed().as_secs_f64());
        let model = Model::new(spec.names, engine, text, adapters, kv_events, &self.metrics).placed(placement);
        let model = Arc::new(model);
        let waiters = {
            let mut table = self.table();
            table.entries[id].loaded(model);
            table.entries[id].load_time = took;
            self.admit(&mut table, id)
        };
        let requests = waiters.len();
        answer(waiters);
        drop(turn);
        log::info!("model {name} is loaded, {waited:.2} s after it was asked for, for {requests} requests: {summary}");
        Ok(())
    }

    /// Waits for the turn of model `id`, and until `bytes` bytes are free. Returns the models that had to leave; `None`
    /// if nobody waits for the model any more.
    fn make_place(self: &Arc<Self>, id: usize, bytes: u64, name: &str) -> Result<Option<Vec<usize>>, LoadError> {
        let need = Need { bytes, memory: self.limits.memory, max_loaded: self.limits.max_loaded };
        let (mut evicted, mut first_since) = (Vec::new(), None);
        let mut table = self.table();
        let result = loop {
            if table.entries[id].is_abandoned() {
                break Ok(false);
            }
            if table.turns.front() != Some(&id) {
                table = self.pause(table);
                continue;
            }
            let since = *first_since.get_or_insert_with(Instant::now);
            match table.next(id, &need) {
                Next::Load => {
                    table.entries[id].bytes = bytes;
                    break Ok(true);
                }
                Next::Evict(other) => {
                    drop(table);
                    if self.evict(other, Leave::Unload, &format!("the model {name} needs its memory")) {
                        evicted.push(other);
                    }
                    table = self.table();
                }
                Next::Never { missing } => break Err(too_large(name, &need, missing)),
                Next::Wait(_) if since.elapsed() >= self.limits.wait => break Err(self.still_in_use(name)),
                Next::Wait(victims) => {
                    // New requests of the others wait until this model has had its turn.
                    for other in victims {
                        let entry = &mut table.entries[other];
                        entry.is_closed |= entry.has_stayed();
                    }
                    table = self.pause(table);
                }
            }
        };
        let waiters = self.reopen(&mut table);
        drop(table);
        waiters.into_iter().for_each(answer);
        if result.is_err() {
            self.bring_back(&evicted);
        }
        result.map(|has_place| has_place.then_some(evicted))
    }

    fn still_in_use(&self, name: &str) -> LoadError {
        let seconds = self.limits.wait.as_secs_f64();
        LoadError::Busy(format!(
            "the model {name} needs the memory of models whose requests have run for {seconds} s (--model-wait)"
        ))
    }

    /// Waits for a change, not longer than [`CHECKED`].
    fn pause<'a>(&'a self, table: MutexGuard<'a, Table>) -> MutexGuard<'a, Table> {
        self.changed.wait_timeout(table, CHECKED).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Opens the models that had to leave and have not left.
    fn reopen(self: &Arc<Self>, table: &mut Table) -> Vec<Waiters> {
        let closed = |entry: &Entry| entry.is_closed && matches!(entry.state, State::Loaded(_));
        let ids: Vec<usize> = (0..table.entries.len()).filter(|id| closed(&table.entries[*id])).collect();
        let open = |id: usize| {
            table.entries[id].is_closed = false;
            self.admit(table, id)
        };
        ids.into_iter().map(open).collect()
    }

    /// Gives a lease of model `id` to each of its waiters. Send them with [`answer`] after the table is unlocked.
    fn admit(self: &Arc<Self>, table: &mut Table, id: usize) -> Waiters {
        let waiters = std::mem::take(&mut table.entries[id].waiters);
        let admit = |waiter| {
            let model = table.entries[id].model()?;
            Some((waiter, self.lease(table, id, model, true)))
        };
        waiters.into_iter().filter_map(admit).collect()
    }

    /// Stops the engine of model `id` if it is idle. False if it is not, or not in memory.
    pub(super) fn evict(self: &Arc<Self>, id: usize, how: Leave, why: &str) -> bool {
        let (name, model, idle, bytes) = {
            let mut table = self.table();
            let entry = &mut table.entries[id];
            if entry.uses > 0 || entry.model().is_none() {
                return false;
            }
            let State::Loaded(model) = std::mem::replace(&mut entry.state, State::Leaving) else { return false };
            (entry.name().to_owned(), model, entry.last_use.elapsed().as_secs_f64(), entry.bytes as f64 / 1e9)
        };
        self.metrics.unloaded(&name);
        let kept = stop(model, how);
        let (text, state) = match kept {
            Some(text) => ("sleeps", State::Sleeping(Box::new(text))),
            None => ("is unloaded", State::Unloaded),
        };
        log::info!("model {name} {text}: {why}; it was idle for {idle:.1} s and had {bytes:.2} GB");
        let again = {
            let mut table = self.table();
            let entry = &mut table.entries[id];
            (entry.state, entry.bytes, entry.is_closed) = (state, 0, false);
            if entry.is_abandoned() { None } else { entry.begin_loading() }
        };
        self.changed.notify_all();
        if let Some(text) = again {
            // Requests came for it while it left.
            self.start_loading(id, text);
        }
        true
    }

    /// The model takes this state instead of being loaded, because nobody waits for it any more.
    fn abandon(&self, id: usize, text: TextSide) {
        let mut table = self.table();
        let entry = &mut table.entries[id];
        entry.waiters.clear();
        entry.state = match text {
            TextSide::Kept(text) => State::Sleeping(text),
            TextSide::New(_) => State::Unloaded,
        };
    }

    /// Tells all who wait for a model why it cannot be used.
    fn fail(&self, id: usize, error: LoadError) {
        log::error!("{error}");
        let waiters = {
            let mut table = self.table();
            let entry = &mut table.entries[id];
            entry.state = match &error {
                LoadError::Failed(_) | LoadError::TooLarge(_) => {
                    State::Failed { error: error.clone(), at: Instant::now() }
                }
                LoadError::Busy(_) | LoadError::Refused(_) => State::Unloaded,
            };
            (entry.bytes, entry.is_wanted) = (0, false);
            std::mem::take(&mut entry.waiters)
        };
        for waiter in waiters {
            // The client may have left.
            let _ = waiter.send(Err(error.clone()));
        }
    }

    /// Loads models again that left for one that could not be loaded.
    fn bring_back(self: &Arc<Self>, evicted: &[usize]) {
        for &id in evicted {
            let start = {
                let mut table = self.table();
                let start = table.entries[id].begin_loading();
                table.entries[id].is_wanted |= start.is_some();
                start
            };
            if let Some(text) = start {
                self.start_loading(id, text);
            }
        }
    }

    /// Stops the engine of a model when its requests have ended. Blocks. False if it was not in memory.
    ///
    /// # Errors
    /// It is pinned or being loaded, or its requests do not end in time.
    pub fn leave(self: &Arc<Self>, ModelId(id): ModelId, how: Leave, why: &str) -> Result<bool, LoadError> {
        let began = Instant::now();
        let mut table = self.table();
        loop {
            let entry = &mut table.entries[id];
            let name = entry.name().to_owned();
            match &entry.state {
                _ if entry.spec.pinned => return Err(LoadError::Refused(format!("the model {name} is pinned"))),
                State::Loading => return Err(LoadError::Busy(format!("the model {name} is being loaded"))),
                State::Sleeping(_) if how == Leave::Unload => {
                    entry.state = State::Unloaded;
                    return Ok(true);
                }
                State::Unloaded | State::Sleeping(_) | State::Failed { .. } => return Ok(false),
                State::Loaded(_) if entry.uses == 0 => {
                    drop(table);
                    if self.evict(id, how, why) {
                        return Ok(true);
                    }
                    table = self.table();
                }
                State::Loaded(_) if began.elapsed() >= self.limits.wait => {
                    let waiters = self.reopen(&mut table);
                    drop(table);
                    waiters.into_iter().for_each(answer);
                    let seconds = self.limits.wait.as_secs_f64();
                    let message = format!("requests have run on the model {name} for {seconds} s (--model-wait)");
                    return Err(LoadError::Busy(message));
                }
                State::Loaded(_) => {
                    entry.is_closed = true;
                    table = self.pause(table);
                }
                State::Leaving => table = self.pause(table),
            }
        }
    }
}

/// Gives waiters their leases.
fn answer(waiters: Waiters) {
    for (waiter, lease) in waiters {
        // A client that has left gives its lease back.
        drop(waiter.send(Ok(lease)));
    }
}

/// Stops the engine of a model that nobody uses, and returns what it keeps.
fn stop(model: Arc<Model>, how: Leave) -> Option<Text> {
    let Some(Model { engine, text, adapters, kv_events, .. }) = Arc::into_inner(model) else {
        log::error!("a model that leaves is still in use; this is a bug");
        return None;
    };
    let end = engine.end();
    // Routers stop sending requests here before the engine stops.
    drop(kv_events);
    drop((engine, adapters));
    end.wait();
    (how == Leave::Sleep).then_some(text)
}

fn too_large(name: &str, need: &Need, missing: Option<u64>) -> LoadError {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    LoadError::TooLarge(match missing {
        Some(missing) => format!(
            "the model {name} needs {:.3} GB, {:.3} GB more than pinned models leave of the {:.3} GB for models \
             (--models-memory)",
            gb(need.bytes),
            gb(missing),
            gb(need.memory.unwrap_or(0))
        ),
        None => format!("the model {name} cannot be loaded next to the pinned models (--max-loaded-models)"),
    })
}

/// The place of a model in the queue for memory, until it is dropped.
struct Turn<'a> {
    models: &'a Models,
    id: usize,
}

impl<'a> Turn<'a> {
    fn begin(models: &'a Models, id: usize) -> Self {
        models.table().turns.push_back(id);
        Self { models, id }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.models.table().turns.retain(|id| *id != self.id);
        self.models.changed.notify_all();
    }
}

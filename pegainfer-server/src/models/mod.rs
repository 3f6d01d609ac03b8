//! The models that requests may name: which of them are in memory, and which come and go.
//!
//! # Layout
//! - [`model`]: a loaded model. [`spec`]: a name, and how its model gets into memory.
//! - [`entry`]: the state of one name. [`table`]: the states of all names, under one lock; it decides who leaves.
//! - [`lease`]: a model in use, which cannot leave. [`switch`]: loads and unloads on threads of their own.
//! - [`status`]: the states in words and numbers. [`idle`]: unloads models that nobody has used for a while.

mod entry;
mod error;
mod idle;
mod lease;
mod model;
mod spec;
mod status;
mod switch;
mod table;

pub use entry::KeepAlive;
pub use error::LoadError;
pub use lease::Lease;
pub use model::{Model, Placement, Text};
pub use spec::{LoadModel, ModelSpec, Prepared, Started, TextSide};
pub use status::{ModelStatus, Status};
pub use switch::Leave;

use crate::metrics::Metrics;
use crate::text_service::GrammarTrial;
use entry::Entry;
use lease::Owner;
use pegainfer_core::engine::EngineStats;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use table::Table;
use tokio::sync::oneshot;

/// Maximum number of requests that wait for one model.
const MAX_WAITING: usize = 1024;

/// Limits on loaded models.
#[derive(Debug, Clone)]
pub struct ModelLimits {
    /// Bytes of all loaded models together; `None` if they are unknown.
    pub memory: Option<u64>,
    /// Maximum number of loaded models.
    pub max_loaded: usize,
    /// Time after which an idle model leaves; `None` keeps it until others need its memory.
    pub idle_time: Option<Duration>,
    /// Maximum time that a model waits for the requests of models that have to leave.
    pub wait: Duration,
}

impl Default for ModelLimits {
    fn default() -> Self {
        Self { memory: None, max_loaded: usize::MAX, idle_time: None, wait: Duration::from_secs(60) }
    }
}

/// The models of a server, by their names.
pub struct Models {
    limits: ModelLimits,
    table: Mutex<Table>,
    /// Notified when a model becomes idle, when a waiter comes or leaves, and when a turn ends.
    changed: Condvar,
    metrics: Arc<Metrics>,
    trial: Option<GrammarTrial>,
}

/// What a request gets at once.
pub enum Access {
    /// The model is in memory.
    Ready(Lease),
    /// The model is being loaded, and comes later.
    Later(oneshot::Receiver<Result<Lease, LoadError>>),
    /// The model cannot be used.
    Refused(LoadError),
}

/// Place of a model in the list of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelId(usize);

impl Models {
    /// The models of these names, none of which is in memory. There is at least one.
    pub fn new(
        specs: Vec<ModelSpec>,
        limits: ModelLimits,
        metrics: Arc<Metrics>,
        trial: Option<GrammarTrial>,
    ) -> Arc<Self> {
        let entries = specs.into_iter().map(Entry::new).collect();
        let table = Mutex::new(Table::new(entries));
        Arc::new(Self { limits, table, changed: Condvar::new(), metrics, trial })
    }

    /// One model, which stays.
    pub fn pinned(model: Model, metrics: Arc<Metrics>) -> Arc<Self> {
        let models = Self::new(vec![ModelSpec::pinned(model.names.clone())], ModelLimits::default(), metrics, None);
        models.put(ModelId(0), model, 0);
        models
    }

    /// Puts a loaded model in its place. `bytes`: the memory that it takes.
    pub fn put(&self, ModelId(id): ModelId, model: Model, bytes: u64) {
        let mut table = self.table();
        table.entries[id].bytes = bytes;
        table.entries[id].loaded(Arc::new(model));
    }

    /// The model with this name; the first one without a name.
    pub fn find(&self, name: Option<&str>) -> Option<ModelId> {
        let Some(name) = name else { return Some(ModelId(0)) };
        let table = self.table();
        let has = |entry: &Entry| entry.spec.names.iter().any(|own| own == name);
        table.entries.iter().position(has).map(ModelId)
    }

    /// The model with an adapter of this name.
    pub fn find_adapter(&self, name: &str) -> Option<ModelId> {
        self.table().entries.iter().position(|entry| entry.has_adapter(name)).map(ModelId)
    }

    /// The names of a model, the canonical one first.
    pub fn names(&self, ModelId(id): ModelId) -> Vec<String> {
        self.table().entries[id].spec.names.clone()
    }

    /// All models, in their order.
    pub fn ids(&self) -> Vec<ModelId> {
        (0..self.table().entries.len()).map(ModelId).collect()
    }

    /// The model for a request. Starts to load it if it is not in memory. `keep_alive` replaces its idle time from now
    /// on.
    pub fn request(self: &Arc<Self>, ModelId(id): ModelId, keep_alive: Option<KeepAlive>) -> Access {
        let (access, start) = {
            let mut table = self.table();
            let entry = &mut table.entries[id];
            if let Some(keep_alive) = keep_alive {
                entry.keep_alive = Some(keep_alive);
            }
            if let Some(model) = entry.available() {
                return Access::Ready(self.lease(&mut table, id, model, true));
            }
            if let Some(error) = entry.recent_failure() {
                return Access::Refused(error);
            }
            if entry.waiters.len() >= MAX_WAITING {
                let name = entry.name();
                return Access::Refused(LoadError::Busy(format!("{MAX_WAITING} requests wait for the model {name}")));
            }
            let (sender, receiver) = oneshot::channel();
            entry.waiters.push(sender);
            (Access::Later(receiver), entry.begin_loading())
        };
        if let Some(text) = start {
            self.start_loading(id, text);
        }
        access
    }

    /// Waits for the model, and loads it if necessary.
    ///
    /// # Errors
    /// It cannot be loaded.
    pub async fn load(self: &Arc<Self>, id: ModelId) -> Result<Lease, LoadError> {
        match self.request(id, None) {
            Access::Ready(lease) => Ok(lease),
            Access::Later(lease) => lease.await.unwrap_or_else(|_| Err(LoadError::stopped())),
            Access::Refused(error) => Err(error),
        }
    }

    /// The model if it is in memory. It counts as in use, but not as a use.
    pub fn peek(self: &Arc<Self>, ModelId(id): ModelId) -> Option<Lease> {
        let mut table = self.table();
        let model = table.entries[id].model()?;
        Some(self.lease(&mut table, id, model, false))
    }

    /// All models in memory.
    pub fn peek_all(self: &Arc<Self>) -> Vec<Lease> {
        self.ids().into_iter().filter_map(|id| self.peek(id)).collect()
    }

    /// Sums of the engines' gauges and counters.
    pub fn stats(self: &Arc<Self>) -> EngineStats {
        self.peek_all().iter().map(|lease| lease.engine.stats()).sum()
    }

    /// Number of requests that wait for a model.
    pub fn waiting(&self) -> usize {
        self.table().entries.iter().flat_map(|entry| &entry.waiters).filter(|waiter| !waiter.is_closed()).count()
    }

    /// Why the server has to end: its only model has stopped.
    pub fn failure(self: &Arc<Self>) -> Option<String> {
        match &self.ids()[..] {
            [only] => self.peek(*only)?.engine.failure().map(str::to_owned),
            _ => None,
        }
    }

    fn lease(self: &Arc<Self>, table: &mut Table, id: usize, model: Arc<Model>, is_use: bool) -> Lease {
        table.entries[id].uses += 1;
        Lease::new(self.clone(), id, model, is_use)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic cannot leave it half-changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Owner for Models {
    fn release(&self, id: usize, is_use: bool) {
        self.table().entries[id].release(is_use);
        self.changed.notify_all();
    }
}

//! The loaded models, which collectors read at each scrape.

use crate::adapters::Adapters;
use crate::kv_events::Counters;
use pegainfer_core::engine::{EngineCell, EngineHandle};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// A loaded model.
#[derive(Clone)]
pub(super) struct ServedModel {
    /// Value of the label `model_name`.
    pub name: Arc<str>,
    pub engine: EngineHandle,
    pub adapters: Option<Arc<Adapters>>,
    /// Counters of each engine's KV events; empty if none are published.
    pub kv_events: Vec<Arc<Counters>>,
}

/// The loaded models. Clones share them.
#[derive(Clone, Default)]
pub(super) struct ServedModels(Arc<RwLock<Vec<ServedModel>>>);

impl ServedModels {
    /// The models. A model is not unloaded while they are read.
    pub fn read(&self) -> RwLockReadGuard<'_, Vec<ServedModel>> {
        // Nothing that can panic runs under the lock.
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a model, in place of one of its name.
    pub fn add(&self, model: ServedModel) {
        let mut models = self.0.write().unwrap_or_else(PoisonError::into_inner);
        models.retain(|other| other.name != model.name);
        models.push(model);
    }

    /// Takes the model with this name away.
    pub fn remove(&self, name: &str) -> Option<ServedModel> {
        let mut models = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let at = models.iter().position(|model| *model.name == *name)?;
        Some(models.remove(at))
    }
}

/// The origin of a series: an engine of a model.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Number of the engine.
    pub engine: usize,
}

/// The engines of each model.
pub(super) fn engines(models: &[ServedModel]) -> impl Iterator<Item = (Origin<'_>, &EngineCell)> {
    models.iter().flat_map(|model| {
        let cells = model.engine.engines().iter().enumerate();
        cells.map(|(engine, cell)| (Origin { model: &model.name, engine }, cell))
    })
}

//! The states of models in words and numbers.

use super::entry::{Entry, State};
use super::model::{Model, Placement};
use super::{ModelId, Models};
use crate::adapters::AdapterCard;
use std::time::SystemTime;

/// State of a model, in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It serves requests.
    Loaded,
    /// It is being loaded, or waits for memory.
    Loading,
    /// Its engine is being stopped.
    Unloading,
    /// Its text side is in memory, its weights are not.
    Sleeping,
    /// It is not in memory.
    Unloaded,
    /// It could not be loaded, or its engine has stopped; the next request tries again.
    Failed,
}

impl Status {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Loading => "loading",
            Self::Unloading => "unloading",
            Self::Sleeping => "sleeping",
            Self::Unloaded => "unloaded",
            Self::Failed => "failed",
        }
    }
}

/// A model, and its state.
#[derive(Debug, Clone)]
pub struct ModelStatus {
    /// Its place.
    pub id: ModelId,
    /// Its names; the first one is the canonical name.
    pub names: Vec<String>,
    /// Its state.
    pub status: Status,
    /// Why it failed.
    pub error: Option<String>,
    /// True if it stays in memory.
    pub pinned: bool,
    /// Memory that it takes, in bytes; 0 if that is unknown.
    pub bytes: u64,
    /// End of its last request.
    pub last_used: Option<SystemTime>,
    /// Its context; `None` before it was loaded once.
    pub max_model_len: Option<usize>,
    /// What it is for: generate, embed or rerank; `None` before it was loaded once.
    pub task: Option<&'static str>,
    /// What it reads: text, or text and images; `None` before it was loaded once.
    pub input_modalities: Option<&'static [&'static str]>,
    /// Where its weights are while it is loaded, if that is known.
    pub placement: Option<Placement>,
    /// Name of the checkpoint while it is loaded.
    pub root: Option<String>,
    /// Its adapters in memory.
    pub adapters: Vec<AdapterCard>,
}

impl Models {
    /// All models, and their states.
    pub fn statuses(&self) -> Vec<ModelStatus> {
        let table = self.table();
        table.entries.iter().enumerate().map(|(id, entry)| entry.status(ModelId(id))).collect()
    }

    /// True if a model that was loaded once reads images.
    pub fn read_images(&self) -> bool {
        self.table().entries.iter().any(|entry| entry.input_modalities.is_some_and(|inputs| inputs.contains(&"image")))
    }

    /// State of one model.
    pub fn status(&self, id: ModelId) -> ModelStatus {
        self.table().entries[id.0].status(id)
    }
}

impl Entry {
    fn status(&self, id: ModelId) -> ModelStatus {
        let (status, error, model) = match &self.state {
            State::Loaded(model) => (Status::Loaded, stopped(model), Some(model)),
            State::Loading => (Status::Loading, None, None),
            State::Leaving => (Status::Unloading, None, None),
            State::Sleeping(_) => (Status::Sleeping, None, None),
            State::Unloaded => (Status::Unloaded, None, None),
            State::Failed { error, .. } => (Status::Failed, Some(error.to_string()), None),
        };
        let adapters = model.and_then(|model| model.adapters.as_ref());
        ModelStatus {
            id,
            names: self.spec.names.clone(),
            status: if error.is_some() { Status::Failed } else { status },
            error,
            pinned: self.spec.pinned,
            bytes: self.bytes,
            last_used: self.last_used,
            max_model_len: self.max_model_len,
            task: self.task,
            input_modalities: self.input_modalities,
            placement: model.and_then(|model| model.placement.clone()),
            root: model.map(|model| model.text.checkpoint.name.clone()),
            adapters: adapters.map_or(Vec::new(), |adapters| adapters.cards()),
        }
    }
}

/// Why a model's engine has stopped.
pub(super) fn stopped(model: &Model) -> Option<String> {
    model.engine.failure().map(|why| format!("its engine has stopped: {why}"))
}

//! Loads adapters from their files, on any thread.

use super::error::AdapterError;
use super::file::{Accepted, AdapterFile};
use super::layout::{AdapterValues, height, segments};
use super::module::ModelModules;
use super::options::slot_rank;
use crate::projection_source::{LayerSources, ProjectionSource};
use half::bf16;
use pegainfer_core::adapter::{Adapter, AdapterId};
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Loads adapters for the engines of one model.
#[derive(Debug)]
pub struct AdapterLoader {
    modules: ModelModules,
    /// Layers of each rank.
    ranks: Vec<Vec<LayerSources>>,
    max_rank: usize,
    skipped: fn(&str) -> Option<&'static str>,
    /// Number of loaded adapters.
    loaded: AtomicU32,
}

/// An adapter, and the facts that users are told.
#[derive(Debug, Clone)]
pub struct LoadedAdapter {
    /// The adapter, for requests.
    pub adapter: Arc<Adapter>,
    /// Its largest rank.
    pub rank: usize,
    /// Number of matrices that it changes.
    pub modules: usize,
    /// Bytes of it on the host.
    pub bytes: usize,
    /// Number of tensors of parts that the engine does not have, and what those are.
    pub skipped: Option<(usize, &'static str)>,
}

impl AdapterLoader {
    /// A loader for a model with these layers, and ranks with their shares of them. `skipped`: what a weight of the
    /// checkpoint is for, if the engine does not have it.
    pub(crate) fn new(
        whole: &[LayerSources],
        ranks: Vec<Vec<LayerSources>>,
        max_rank: usize,
        skipped: fn(&str) -> Option<&'static str>,
    ) -> Self {
        Self { modules: ModelModules::of(whole), ranks, max_rank, skipped, loaded: AtomicU32::new(0) }
    }

    /// Bytes of this many slots on a device.
    pub(crate) fn slot_bytes(&self, slots: usize) -> u64 {
        let sources = self.ranks.first().into_iter().flatten().flat_map(LayerSources::all).flatten();
        let values = |source: &ProjectionSource| segments(source).len() * source.columns.part.len() + height(source);
        let values: usize = sources.map(values).sum();
        (slots * slot_rank(self.max_rank) * values * size_of::<bf16>()) as u64
    }

    /// Maximum rank of an adapter.
    pub fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// Loads the adapter in the folder `path`, or the file in safetensors of this path with its configuration beside it.
    pub fn load(&self, path: &Path) -> Result<LoadedAdapter, AdapterError> {
        let accepted = Accepted { modules: &self.modules, max_rank: self.max_rank, skipped: self.skipped };
        let file = AdapterFile::read(path, &accepted)?;
        let values = AdapterValues::new(&file, &self.ranks, slot_rank(self.max_rank));
        let bytes = values.bytes();
        let id = NonZeroU32::MIN.saturating_add(self.loaded.fetch_add(1, Ordering::Relaxed));
        Ok(LoadedAdapter {
            adapter: Arc::new(Adapter::new(AdapterId(id), values)),
            rank: file.modules.values().map(|factors| factors.rank).max().unwrap_or(0),
            modules: file.modules.len(),
            bytes,
            skipped: file.skipped,
        })
    }
}

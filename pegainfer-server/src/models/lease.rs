//! A model in use.

use super::model::Model;
use std::ops::Deref;
use std::sync::Arc;

/// A model in use: it stays in memory until the lease is dropped.
pub struct Lease {
    /// `None` only while it is dropped.
    model: Option<Arc<Model>>,
    id: usize,
    /// True if the use counts for the time of the last use.
    is_use: bool,
    owner: Arc<dyn Owner>,
}

/// Owns the models.
pub(super) trait Owner: Send + Sync {
    /// Ends the use of model `id`. `is_use`: see [`Lease`].
    fn release(&self, id: usize, is_use: bool);
}

impl Lease {
    /// A use of model `id`, which the owner has counted.
    pub(super) fn new(owner: Arc<dyn Owner>, id: usize, model: Arc<Model>, is_use: bool) -> Self {
        Self { model: Some(model), id, is_use, owner }
    }
}

impl Deref for Lease {
    type Target = Model;

    fn deref(&self) -> &Model {
        match &self.model {
            Some(model) => model,
            None => unreachable!("the model is taken only by drop"),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The owner has the model, so this does not stop its engine.
        self.model = None;
        self.owner.release(self.id, self.is_use);
    }
}

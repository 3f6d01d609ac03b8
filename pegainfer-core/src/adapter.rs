//! Adapters (LoRA) that requests name: changes to the model's projections, loaded while the engine runs.

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;

/// Number of a loaded adapter, never used again: an adapter that is loaded again from changed files has another one, and
/// finds none of the cached prefixes of the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub NonZeroU32);

/// A loaded adapter. Requests hold it, so its weights stay in memory until the last of them has ended.
pub struct Adapter {
    id: AdapterId,
    weights: Box<dyn Any + Send + Sync>,
}

impl Adapter {
    /// An adapter with weights of a type that its engine knows.
    pub fn new(id: AdapterId, weights: impl Any + Send + Sync) -> Self {
        Self { id, weights: Box::new(weights) }
    }

    /// Its number.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// The weights; `None` if they are of another type.
    pub fn weights<W: Any>(&self) -> Option<&W> {
        self.weights.downcast_ref()
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Adapter").field(&self.id.0).finish()
    }
}

impl PartialEq for Adapter {
    /// True for the same load.
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

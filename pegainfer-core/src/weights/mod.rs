//! Weights: from safetensors by mmap, or seeded random ones (`--load-format dummy`).

mod checkpoint;
mod dummy;
mod loader;

pub use checkpoint::{Checkpoint, WeightsError};
pub use loader::{Loader, Part, Source};

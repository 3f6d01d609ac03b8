//! Weights: safetensors checkpoints, and seeded random weights (`--load-format dummy`).

mod checkpoint;
mod dummy;
mod loader;

pub use checkpoint::{Checkpoint, Stored, WeightsError, is_file_name};
pub use dummy::uniform;
pub use loader::{Loader, Part, Source, Uniform};
pub use safetensors::Dtype as StoredDtype;

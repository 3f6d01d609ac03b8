//! Weights: checkpoints in safetensors and GGUF, and seeded random weights (`--load-format dummy`).

mod block_scales;
mod checkpoint;
mod dummy;
mod error;
mod feed;
pub mod gguf;
pub mod grouped;
mod loader;
mod stored;

pub use block_scales::{SCALE_BLOCK, scale_name};
pub use checkpoint::{Checkpoint, is_file_name};
pub use dummy::{dummy_scales, random_bytes, random_bytes_from, uniform};
pub use error::WeightsError;
pub use loader::{
    Columns, FillDummy, GroupedTensors, Loader, Quantize, RandomBytes, Source, SourceTensor, Uniform, format_of,
    grouped_scale_name,
};
pub use safetensors::Dtype as StoredDtype;
pub use stored::Stored;

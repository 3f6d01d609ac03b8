//! What the model crates share: loading a checkpoint, running steps on a device, and recording kernel plans. A model crate
//! implements [`Model`].
//!
//! # Layout
//! - `model`: the trait; `model_info`, `model_bytes`: the numbers that the rest needs of a model.
//! - `config_file`, `load_options`, `load_error`, `bounds`: from config.json and flags to the sizes of an engine; `fit`, `gpu_fit`: whether
//!   that fits the memory.
//! - `output_matrix`: tied embeddings. `end_of_text`: tokens that end a text. `sizes`: bounds of the numbers.
//! - `quantization`: FP8 weights. `rope_scaling`: YaRN.
//! - `load`, `record`: an engine from a checkpoint, a kernel plan from a configuration. `measure`: step times for the ledger.
//! - `executor`: steps in flight and CUDA graphs; `drafting`, `block_drafting`: the passes of the layers
//!   that draft; `inputs`, `block_tables`, `logits_processors`, `sampler`, `readbacks`: what every step
//!   begins and ends with.
//! - `synthetic_acceptance`: drafts that are accepted for timing.
//! - `decoder`, `decoder_workspace`, `attention`, `sampled_rows`: parts of dense decoders: weights, activations, full
//!   attention.

mod attention;
pub mod block_drafting;
mod block_tables;
mod bounds;
mod config_file;
mod decoder;
mod decoder_workspace;
pub mod drafting;
pub mod end_of_text;
mod executor;
mod fit;
mod gpu_fit;
mod inputs;
mod load;
mod load_error;
mod load_options;
mod logits_processors;
mod measure;
mod model;
mod model_bytes;
mod model_info;
mod output_matrix;
mod quantization;
mod readbacks;
mod record;
mod rope_scaling;
mod sampled_rows;
mod sampler;
mod sizes;
mod synthetic_acceptance;

pub use attention::{Attention, KvLayer};
pub use bounds::{Bounds, StepSize};
pub use config_file::{ConfigError, ConfigFile, Overrides, Served, unsupported};
pub use decoder::{DecoderShape, DecoderWeights, Mlp, load_head};
pub use decoder_workspace::{Activations, AttentionScratch, DecoderWorkspace};
pub use executor::Executor;
pub use gpu_fit::GpuFit;
pub use inputs::Inputs;
pub use load::{Engine, Loaded, load, load_weights};
pub use load_error::LoadError;
pub use load_options::{DEFAULT_KV_BYTES, DEFAULT_STATE_BYTES, LoadOptions, STATE_SHARE};
pub use measure::{Measurable, Measured, measure, measure_again};
pub use model::{Model, Parts, Pass, StepOf, padded, ragged, uniform};
pub use model_info::{ModelBytes, ModelInfo};
pub use output_matrix::HEAD;
pub use quantization::{Quantization, load_projection};
pub use readbacks::Readbacks;
pub use record::{record, record_step};
pub use sampled_rows::{SampledRows, gather_rows};
pub use sampler::{BlockLogits, LogitsSource, Sampler};
pub use sizes::MAX_CONTEXT;
pub use synthetic_acceptance::SyntheticAcceptance;

//! The model runtime: one loader and one executor for every model built from the ops of `pegainfer-kernels`.
//!
//! A model crate implements [`Model`]: configuration, weights, state and forward pass. [`load`] builds an engine from
//! it, whose steps the executor runs, samples and reads back; [`record`] builds its kernel plan, [`measure`] its
//! ledger.
//!
//! # Example
//!
//! A model without layers predicts each token from the previous one. Its kernel plan needs neither weights nor a
//! device.
//!
//! ```
//! use pegainfer_core::exec::Exec;
//! use pegainfer_core::tensor::{DType, OpError, Tensor};
//! use pegainfer_core::weights::{Loader, WeightsError};
//! use pegainfer_kernels::ops::{self, Matrix};
//! use pegainfer_runtime::{
//!     Bounds, ConfigError, ConfigFile, LoadError, Model, ModelInfo, Parts, Pass, gather_rows, record,
//! };
//!
//! #[derive(Debug)]
//! struct Bigram;
//!
//! #[derive(Debug, Clone)]
//! struct Config {
//!     vocab_size: usize,
//!     hidden_size: usize,
//! }
//!
//! impl Model for Bigram {
//!     const NAME: &'static str = "Bigram";
//!     const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("BigramForCausalLM", "bigram")];
//!
//!     type Options = ();
//!     type Config = Config;
//!     /// The embedding, `[vocab, hidden]`, the weight of a norm, `[hidden]`, and the embedding as the output matrix.
//!     type Weights = (Tensor, Tensor, Matrix);
//!     /// Embedded tokens, and the same normalised, `[tokens, hidden]`.
//!     type Workspace = [Tensor; 2];
//!     type Cache = ();
//!     type State = ();
//!
//!     fn config(file: ConfigFile) -> Result<Config, ConfigError> {
//!         Ok(Config { vocab_size: file.size("vocab_size")?, hidden_size: file.size("hidden_size")? })
//!     }
//!
//!     fn info(config: &Config) -> ModelInfo {
//!         ModelInfo {
//!             vocab_size: config.vocab_size,
//!             max_position_embeddings: 4096,
//!             eos_token_ids: vec![0],
//!             initializer_range: 0.02,
//!             fp8_weights: false,
//!             drafts: false,
//!             draft_block: None,
//!             image_token: None,
//!             max_default_tokens: 8192,
//!         }
//!     }
//!
//!     fn weights(loader: &mut Loader<'_>, config: &Config) -> Result<Self::Weights, WeightsError> {
//!         let embedding = loader.matrix("embedding.weight".to_owned(), config.vocab_size, config.hidden_size)?;
//!         let head = Matrix::Bf16(embedding.row_range(0..config.vocab_size));
//!         Ok((embedding, loader.vector("norm.weight".to_owned(), config.hidden_size)?, head))
//!     }
//!
//!     fn workspace(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<[Tensor; 2]> {
//!         let shape = [bounds.size.tokens, config.hidden_size];
//!         Ok([exec.tensor("embedded", &shape, DType::Bf16)?, exec.tensor("normed", &shape, DType::Bf16)?])
//!     }
//!
//!     fn cache(_parts: Parts<'_, Self>, _bounds: &Bounds, _blocks: usize) -> Result<(), LoadError> {
//!         Ok(())
//!     }
//!
//!     fn state(_config: &Config, _bounds: &Bounds) {}
//!
//!     fn begin(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
//!         pass.work.iter_mut().for_each(|tensor| tensor.set_rows(pass.step.tokens.len()));
//!         Ok(())
//!     }
//!
//!     fn forward(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
//!         let Pass { exec, weights: (embedding, norm, _), work: [embedded, normed], inputs, previous, step, .. } = pass;
//!         ops::embedding(exec, &inputs.tokens, previous, embedding, embedded)?;
//!         ops::rms_norm(exec, embedded, norm, 1e-6, &mut *normed)?;
//!         if step.samples_every_token() {
//!             return Ok(());
//!         }
//!         gather_rows(exec, &inputs.sample_rows, [(normed, embedded)])
//!     }
//!
//!     fn output<'a>([_, normed]: &'a mut [Tensor; 2], weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Matrix) {
//!         (normed, &weights.2)
//!     }
//! }
//!
//! let config = Bigram::parse_config(r#"{"vocab_size": 4096, "hidden_size": 256}"#)?;
//! // A decode step of 8 sequences with contexts of 100 tokens.
//! let ops: Vec<_> = record::<Bigram>(&config, 1, (8, 1, 100))?.iter().map(|record| record.op).collect();
//! assert_eq!(ops, ["embedding", "rms_norm", "linear", "sample"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Layout
//! - `model`: the trait; `model_info`, `model_bytes`: numbers of a model that the runtime needs.
//! - `config_file`, `load_options`, `load_error`, `bounds`: from config.json and flags to the sizes of an engine;
//!   `fit`, `gpu_fit`: check that these fit the memory.
//! - `output_matrix`: tied embeddings. `vocab_padding`: vocabularies of any size. `end_of_text`: end-of-text tokens.
//!   `sizes`: limits of numbers in config.json.
//! - `quantization`: quantised weights, `at_load`: formats to which bf16 weights are rounded. `rope_scaling`: YaRN.
//! - `load`, `record`: an engine from a checkpoint, a kernel plan from a configuration. `measure`: step times for the
//!   ledger.
//! - `executor`: steps in flight; `graph_shape`: passes that run as CUDA graphs; `pass_kind`, `drafting`,
//!   `block_drafting`, `block_shape`: passes of the layers that draft; `draft_method`: checks that they are there;
//!   `inputs`, `block_tables`, `logits_processors`, `sampler`, `readbacks`: inputs and results of every step.
//! - `lora`: low-rank adapters; `projection_source`: where the rows of a fused projection are in the checkpoint.
//! - `tensor_hash`: comparison of ranks.
//! - `synthetic_acceptance`: a fixed acceptance rate of drafts, for benchmarking.
//! - `decoder`, `decoder_workspace`, `attention`, `mlp`, `mlp_scratch`, `moe`, `moe_shape`, `sampled_rows`: parts of decoders:
//!   weights, activations, full attention, dense MLPs and experts.

mod at_load;
mod attention;
mod block_drafting;
mod block_shape;
mod block_tables;
mod bounds;
mod chosen_experts;
mod config_file;
mod decoder;
mod decoder_workspace;
mod draft_method;
mod drafting;
mod end_of_text;
mod executor;
mod expert_readback;
mod fit;
mod gpu_fit;
mod graph_shape;
mod inputs;
mod load;
mod load_error;
mod load_options;
mod logits_processors;
mod lora;
mod measure;
mod mlp;
mod mlp_scratch;
mod model;
mod model_bytes;
mod model_info;
mod moe;
mod moe_shape;
mod output_matrix;
mod pass_kind;
mod projection_source;
mod quantization;
mod readbacks;
mod record;
mod rope_scaling;
mod sampled_rows;
mod sampler;
mod sizes;
mod synthetic_acceptance;
mod tensor_hash;
mod tiers;
mod vocab_padding;
mod warm_up;

pub use at_load::AtLoad;
pub use attention::{Attention, KvLayer};
pub use block_shape::BlockShape;
pub use bounds::{Bounds, StepSize};
pub use chosen_experts::ChosenExperts;
pub use config_file::{ConfigError, ConfigFile, Overrides, Served, unsupported};
pub use decoder::{DecoderShape, DecoderWeights, load_head};
pub use decoder_workspace::{Activations, AttentionScratch, DecoderWorkspace};
pub use executor::Executor;
pub use expert_readback::ExpertLayers;
pub use gpu_fit::{GpuFit, rank_bytes};
pub use graph_shape::{GraphReplays, is_prompt_step};
pub use inputs::Inputs;
pub use load::{Loaded, ModelEngine, load, load_rank_weights, load_weights};
pub use load_error::LoadError;
pub use load_options::{DEFAULT_KV_BYTES, DEFAULT_STATE_BYTES, LoadOptions, STATE_SHARE};
pub use lora::{AdapterError, AdapterLoader, Adapters, LoadedAdapter, LoraOptions, Projection, adapted_linear};
pub use measure::{Measurable, Measured, measure, measure_again};
pub use mlp::{DenseMlp, Mlp, MlpKind};
pub use mlp_scratch::MlpScratch;
pub use model::{KeptTensors, Model, Parts, Pass, StepOf, padded, ragged, uniform};
pub use model_info::{ModelBytes, ModelInfo};
pub use moe::Moe;
pub use moe_shape::MoeShape;
pub use output_matrix::HEAD;
pub use pass_kind::PassKind;
pub use projection_source::{LayerSources, ProjectionSource};
pub use quantization::{Quantization, load_projection};
pub use record::{record, record_blocks, record_step, record_with};
pub use sampled_rows::{SampledRows, gather_rows};
pub use sizes::MAX_CONTEXT;
pub use synthetic_acceptance::SyntheticAcceptance;
pub use tensor_hash::hash_rows;
pub use vocab_padding::{load_embedding, padded_vocab};

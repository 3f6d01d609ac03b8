//! From `--model-path` to a running engine.
//!
//! # Layout
//! - [`args`]: the flags of all commands that load a model. [`speculative`]: the settings of `--speculative-config`.
//! - [`model_path`], [`bundled`], `model_dir`: the directory of a checkpoint. [`weight_memory`]: whether its weights fit.
//! - [`detect`]: the registry of model families, and the family of a directory. [`mod@engine`]: starts its engine.
//! - [`engine_grammar`]: pegainfer-text's grammars in the form that an engine uses.
//!
//! # Example
//! ```
//! use clap::Parser;
//! use pegainfer_core::engine::{GenerateRequest, TokenEvent};
//! use pegainfer_models::{args::EngineArgs, load};
//! use pegainfer_text::Tokenizer;
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     engine: EngineArgs,
//! }
//!
//! // Without --model-path, the bundled checkpoint.
//! let flags = Flags::parse_from(["example", "--device", "cpu"]);
//! let model = load(&flags.engine, |dir| Ok(Tokenizer::load(dir)?))?;
//! let prompt = model.text.encode("Once upon a", false)?;
//! let mut stream = model.engine.handle.submit(GenerateRequest::greedy(prompt, 1))?;
//! let mut generated = String::new();
//! while let Some(event) = stream.blocking_recv() {
//!     if let TokenEvent::Token(token) = event {
//!         generated += &model.text.token_text(token.id);
//!     }
//! }
//! assert_eq!(generated, " time");
//! # Ok::<(), anyhow::Error>(())
//! ```

pub mod args;
pub mod bundled;
pub mod detect;
pub mod engine;
pub mod engine_grammar;
mod load;
mod model_dir;
pub mod model_path;
pub mod speculative;
pub mod weight_memory;

pub use load::{LoadedModel, load};

//! The text side of a served model: tokenizer threads, and grammars compiled within limits. Tenants take turns.
//! pegainfer-text implements the text processing.

mod checkpoint;
mod encoder;
mod grammar_cache;
mod grammars;
mod images;
mod priority;
mod task;
mod trial;
mod workers;

pub use checkpoint::{Checkpoint, SamplingDefaults};
pub use encoder::{Encoder, encode, limit_encoder_threads};
pub use grammar_cache::AccountedGrammar;
pub use grammars::GrammarService;
pub use images::ImageReader;
pub use task::Task;
pub use trial::{COMMAND as TRIAL_COMMAND, GrammarLimits, GrammarTrial, run as run_trial};
pub use workers::{CancelCheck, EncoderError, LARGE, Workers};

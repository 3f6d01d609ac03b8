//! The text side of a served model, shared by its clients: threads that tokenize, and grammars that are compiled within
//! limits. Clients take turns by tenant. What is done to the text is pegainfer-text's.

mod checkpoint;
mod encoder;
mod grammar_cache;
mod grammars;
mod priority;
mod trial;

pub use checkpoint::{Checkpoint, SamplingDefaults};
pub use encoder::{Caller, Encoder, EncoderError, LARGE, encode, limit_encoder_threads};
pub use grammar_cache::AccountedGrammar;
pub use grammars::GrammarService;
pub use trial::{COMMAND as TRIAL_COMMAND, GrammarLimits, GrammarTrial, run as run_trial};

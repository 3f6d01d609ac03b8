//! Text and tokens: everything between a request's strings and the engine's token ids.

mod checkpoint;
mod deepseek_v4;
mod detokenizer;
mod effort;
mod encoder;
mod grammar;
pub mod parser;
mod partial_json;
mod priority;
mod reasoned;
mod recorded_grammar;
mod stop;
mod template;
mod tojson;
mod tokenizer;

pub use checkpoint::{Checkpoint, SamplingDefaults};
pub use detokenizer::Detokenizer;
pub use encoder::{Caller, Encoder, LARGE, encode, limit_encoder_threads};
pub use grammar::service::GrammarService;
pub use grammar::trial::{self, GrammarLimits, GrammarTrial};
pub use grammar::{GrammarCompiler, GrammarError, GrammarSource, with_options};
pub use partial_json::{CutString, complete_object, exact_object, is_object};
pub use recorded_grammar::ReasoningLimits;
pub use stop::StopScanner;
pub use template::{ChatTemplate, TemplateError};
pub use tojson::dumps;
pub use tokenizer::{Tokenizer, TokenizerError};

//! Text and token ids of language models: everything between the strings of a request and the ids of an engine.
//!
//! - [`Tokenizer`]: text to ids, from `tokenizer.json`. [`Detokenizer`], [`StopScanner`]: ids to text during
//!   generation.
//! - [`ChatTemplate`]: messages to a prompt, with the checkpoint's Jinja template or a built-in encoding.
//! - [`parser`]: the model's text to reasoning, content and tool calls.
//! - [`GrammarCompiler`]: schemas, regular expressions and Lark to masks of the tokens that may come next.
//! - [`complete_object`], [`dumps`]: JSON as models and templates write it.
//!
//! This crate starts no engine and listens on no socket. Results do not depend on how text is cut into deltas.
//!
//! ```
//! use pegainfer_text::parser::{CallPrefix, Event, OutputParser, ParserOptions, ReasoningStart, ToolFormat};
//! use pegainfer_text::{ChatTemplate, Detokenizer, GrammarCompiler, GrammarSource, Tokenizer};
//! use serde_json::{Map, json};
//! use std::sync::Arc;
//!
//! // The checkpoint that is bundled with pegainfer; any directory with tokenizer.json and a chat template will do.
//! let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
//! let tokenizer = Arc::new(Tokenizer::load(&dir)?);
//! let template = ChatTemplate::load(&dir)?.expect("it has a chat template");
//!
//! let messages = [json!({"role": "user", "content": "Hi!"})];
//! let prompt = template.render(&messages, None, true, &Map::new())?;
//! assert!(prompt.contains("<|im_start|>user\nHi!<|im_end|>\n"));
//!
//! let (ids, mut detokenizer, mut text) = (tokenizer.encode("Once upon", false)?, Detokenizer::new(false),
//! String::new());
//! ids.iter().for_each(|id| detokenizer.push(&tokenizer, *id, &mut text));
//! assert_eq!(text, "Once upon");
//!
//! let mut parser = OutputParser::new(ParserOptions {
//!     reasoning: ReasoningStart::IfOpened,
//!     include_reasoning: true,
//!     tools: Some(ToolFormat::Hermes),
//!     prefix: CallPrefix::None,
//!     definitions: Arc::new([]),
//!     max_calls: 1,
//!     id_seed: 0,
//! });
//! let events = parser.push("<think>Hm.</think>Hello");
//! assert!(matches!(&events[..], [Event::Reasoning(hm), Event::Content(hello)] if hm == "Hm." && hello == "Hello"));
//!
//! let compiler = GrammarCompiler::new(tokenizer.clone(), 4096, vec![4089]);
//! let (mut matcher, first) = compiler.compile(GrammarSource::Regex("[0-9]+".into()))?.start();
//! let seven = tokenizer.encode("7", false)?[0];
//! assert!(first.allows(seven) && !first.allows(4089), "no number is empty");
//! assert!(matcher.next(seven)?.allows(4089), "it may end here");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod deepseek_v4;
mod detokenizer;
mod effort;
mod grammar;
pub mod parser;
mod partial_json;
mod stop;
mod template;
mod tojson;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use grammar::{
    AllowedTokens, COMPILER_STACK, CompiledGrammar, CompiledMatcher, Grammar, GrammarCompiler, GrammarError,
    GrammarSource, Matcher, ReasonedGrammar, ReasonedMatcher, ReasoningLimits, compile_over_bytes, with_options,
};
pub use partial_json::{CutString, complete_object, exact_object, is_object};
pub use stop::StopScanner;
pub use template::{ChatTemplate, TemplateError};
pub use tojson::dumps;
pub use tokenizer::{Tokenizer, TokenizerError};

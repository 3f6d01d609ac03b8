//! Output parser: splits the model's text into reasoning, content and tool calls.
//!
//! Text arrives in deltas that may be cut anywhere, and is emitted as [`Event`]s as soon as its meaning is certain. The
//! events do not depend on the cuts, once neighbouring deltas are joined. A tag is never emitted in part, and no text
//! is lost: text that only looks like a call becomes content. Only white space next to tags is dropped, which the
//! templates put there themselves.
//!
//! Between the start and the end of a call there are only its arguments, always one JSON object. Slips are repaired as
//! described in docs/api/tools-and-reasoning.md. A call that the output cuts off is marked incomplete.
//!
//! # Layout
//! - [`reasoning`]: splits off the text inside `<think>`. [`tools`]: splits the rest into content and calls.
//!   [`call_start`]: where calls begin.
//! - [`hermes`], [`qwen3_coder`], [`dsml`]: parse the formats of calls. [`arguments`]: the object of a call's
//!   arguments.
//! - [`json_reader`], [`json_text`]: strict JSON from models' text.
//! - [`tag_value`], [`value_end`], [`dsml_tags`]: values between tags and where they end. [`parameter`], [`typed`]:
//!   their types.
//! - [`forced`]: grammar of a forced call. [`raw_text`], [`schema`]: grammar of its values without quotes.
//! - [`cursor`]: the unparsed text. [`output`]: the events.

mod arguments;
mod call_start;
mod cursor;
mod dsml;
mod dsml_tags;
mod forced;
mod format;
mod hermes;
mod json_reader;
mod json_text;
mod output;
mod parameter;
mod qwen3_coder;
mod raw_text;
mod reasoning;
mod schema;
mod tag_value;
#[cfg(test)]
mod tests;
mod tools;
mod typed;
mod value_end;

pub use forced::{LARK, grammar as forced_grammar, grammar_or};
pub use format::{CALL_OPEN, CallPrefix, ToolFormat};
pub use output::Event;
pub use reasoning::{CLOSE as THINK_CLOSE, OPEN as THINK_OPEN, ReasoningStart};

use call_start::CallSearch;
use output::EventCollector;
use reasoning::ReasoningParser;
use serde_json::Value;
use std::sync::Arc;
use tools::ToolParser;

/// The output format of a model, as its chat template shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputFormat {
    /// True if the model reasons inside `<think>`.
    pub reasoning: bool,
    /// Format of tool calls; `None` if the template has no tools.
    pub tools: Option<ToolFormat>,
}

impl OutputFormat {
    /// Detects the format: the model writes the same tags as the template writes into the history.
    pub fn detect(source: &str) -> Self {
        let tools = match (source.contains("<function="), source.contains(CALL_OPEN)) {
            (true, _) => Some(ToolFormat::Qwen3Coder),
            (false, true) => Some(ToolFormat::Hermes),
            (false, false) => None,
        };
        Self { reasoning: source.contains(reasoning::CLOSE), tools }
    }
}

/// Options for parsing one output.
#[derive(Debug)]
pub struct ParserOptions {
    /// How the reasoning starts.
    pub reasoning: ReasoningStart,
    /// True emits the reasoning; false drops it.
    pub include_reasoning: bool,
    /// Format of tool calls; `None` does not parse calls.
    pub tools: Option<ToolFormat>,
    /// Beginning of the first call that the prompt contains.
    pub prefix: CallPrefix,
    /// The request's tools in OpenAI's format, for the types of their parameters.
    pub definitions: Arc<[Value]>,
    /// Maximum number of calls; more are dropped.
    pub max_calls: usize,
    /// Seed of the call ids, for unique ids.
    pub id_seed: u64,
}

/// Parses one output.
pub struct OutputParser {
    reasoning: ReasoningParser,
    tools: Option<ToolParser>,
    out: EventCollector,
}

impl OutputParser {
    /// A parser at the start of the output.
    pub fn new(options: ParserOptions) -> Self {
        let ParserOptions { prefix, definitions, .. } = options;
        let search = options.tools.map(|format| CallSearch { format, definitions, bare_json: true });
        Self {
            reasoning: ReasoningParser::new(options.reasoning, search.clone()),
            tools: search.map(|search| ToolParser::new(search, prefix)),
            out: EventCollector::new(options.include_reasoning, options.max_calls, options.id_seed),
        }
    }

    /// Parses a delta of text and returns the events that are certain.
    pub fn push(&mut self, delta: &str) -> Vec<Event> {
        let rest = self.reasoning.push(delta, &mut self.out);
        self.after_reasoning(&rest);
        self.out.take()
    }

    /// Ends the text: returns the events of the text that was held back.
    pub fn finish(&mut self) -> Vec<Event> {
        let rest = self.reasoning.finish(&mut self.out);
        self.after_reasoning(&rest);
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut self.out);
        }
        self.out.take()
    }

    /// True if the position is between the reasoning tags.
    pub fn in_reasoning(&self) -> bool {
        self.reasoning.is_inside()
    }

    /// True in or after a call inside the reasoning that may be a draft. At the end of the text, true if it was a call.
    pub fn in_early_call(&self) -> bool {
        self.reasoning.is_in_draft()
    }

    /// True if a call was found.
    pub fn has_calls(&self) -> bool {
        self.out.calls > 0
    }

    /// Parses text that is not reasoning.
    fn after_reasoning(&mut self, text: &str) {
        match &mut self.tools {
            Some(tools) => tools.push(text, &mut self.out),
            None => self.out.content(text),
        }
    }
}

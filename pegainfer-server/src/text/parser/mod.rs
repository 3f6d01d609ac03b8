//! What a chat model writes, told apart: reasoning, answer and tool calls.
//!
//! Text comes in pieces, cut anywhere, and goes out as [`Event`]s as soon as it is certain what it is. Where the cuts fall
//! makes no difference: the events of any two cuts are the same once neighbouring deltas are joined. A tag is never given out
//! in part, and no text is lost: what looks like a call and is none becomes content. Only white space around tags goes,
//! which the templates put there themselves.
//!
//! # Layout
//! - [`reasoning`]: text inside `<think>` and the rest. [`tools`]: the rest, as content and calls.
//! - [`hermes`], [`qwen3_coder`], [`dsml`]: the ways to write a call. [`parameter`], [`typed`]: the second's values.
//! - [`forced`]: the grammar that a forced call follows. [`cursor`], [`output`]: what goes in and what comes out.

mod cursor;
mod dsml;
mod forced;
mod hermes;
mod output;
mod parameter;
mod qwen3_coder;
mod reasoning;
#[cfg(test)]
mod tests;
mod tools;
mod typed;

pub use forced::{grammar as forced_grammar, grammar_or};
pub use output::Event;
pub use reasoning::{CLOSE as THINK_CLOSE, OPEN as THINK_OPEN, ReasoningStart};
pub use tools::{CALL_OPEN, CallPrefix, ToolFormat};

use output::Output;
use reasoning::ReasoningParser;
use serde_json::Value;
use tools::ToolParser;

/// What a checkpoint's chat template teaches its model to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputFormat {
    /// Reasoning inside `<think>`.
    pub reasoning: bool,
    /// How calls are written; `None`: the template knows no tools.
    pub tools: Option<ToolFormat>,
}

impl OutputFormat {
    /// Reads it off the template: the tags it writes into the history are the ones the model writes.
    pub fn of_template(source: &str) -> Self {
        let tools = match (source.contains("<function="), source.contains(tools::CALL_OPEN)) {
            (true, _) => Some(ToolFormat::Qwen3Coder),
            (false, true) => Some(ToolFormat::Hermes),
            (false, false) => None,
        };
        Self { reasoning: source.contains(reasoning::CLOSE), tools }
    }
}

/// How one answer is to be read.
#[derive(Debug)]
pub struct ParserOptions {
    /// What the prompt says about reasoning.
    pub reasoning: ReasoningStart,
    /// False drops the reasoning.
    pub include_reasoning: bool,
    /// How calls are written; `None`: they are not looked for.
    pub tools: Option<ToolFormat>,
    /// What the prompt has of the first call already.
    pub prefix: CallPrefix,
    /// The request's tools in OpenAI's form, for the types of their parameters.
    pub definitions: Vec<Value>,
    /// Calls after these are dropped.
    pub max_calls: usize,
    /// Makes the ids of the calls unique.
    pub id_seed: u64,
}

/// Reads one answer.
pub struct OutputParser {
    reasoning: ReasoningParser,
    tools: Option<ToolParser>,
    out: Output,
}

impl OutputParser {
    /// Nothing read yet.
    pub fn new(options: ParserOptions) -> Self {
        let ParserOptions { prefix, definitions, .. } = options;
        Self {
            reasoning: ReasoningParser::new(options.reasoning, options.tools == Some(ToolFormat::Qwen3Coder)),
            tools: options.tools.map(|format| ToolParser::new(format, prefix, definitions)),
            out: Output::new(options.include_reasoning, options.max_calls, options.id_seed),
        }
    }

    /// Takes a piece of text and gives out what is certain now.
    pub fn push(&mut self, piece: &str) -> Vec<Event> {
        let rest = self.reasoning.push(piece, &mut self.out);
        self.answer(&rest);
        self.out.take()
    }

    /// Gives out what was held back, when no more text follows.
    pub fn finish(&mut self) -> Vec<Event> {
        let rest = self.reasoning.finish(&mut self.out);
        self.answer(&rest);
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut self.out);
        }
        self.out.take()
    }

    /// True between the tags around the reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.reasoning.is_inside()
    }

    /// True once a call was found.
    pub fn has_calls(&self) -> bool {
        self.out.calls > 0
    }

    /// Text that is not reasoning.
    fn answer(&mut self, text: &str) {
        match &mut self.tools {
            Some(tools) => tools.push(text, &mut self.out),
            None => self.out.content(text),
        }
    }
}

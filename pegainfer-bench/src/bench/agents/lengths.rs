//! Lengths of the texts, for the tokenizer of one server.

use super::args::AgentsArgs;
use anyhow::{Result, ensure};

/// Lengths of texts in words, for the tokenizer of one server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Mean number of tokens in a word.
    pub tokens_per_word: f64,
    /// Words of the system prompt after its tool definitions.
    pub system: usize,
    /// Words of a task.
    pub task: usize,
    /// Words of a tool result.
    pub turn: usize,
}

/// Prompt tokens of texts without words, by which a server's tokenizer is measured.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// Tokens of a system prompt and a task.
    pub system: usize,
    /// Tokens of a call and its result.
    pub turn: usize,
    /// Number of words in a longer prompt.
    pub words: usize,
    /// Tokens of these words.
    pub tokens: usize,
}

impl Lengths {
    /// Lengths for these flags, from the prompts of texts without words and of longer ones.
    pub fn new(args: &AgentsArgs, probe: Probe) -> Result<Self> {
        let Probe { system, turn, words, tokens } = probe;
        ensure!(tokens > 0, "the server's prompt_tokens do not grow with the prompt");
        let tokens_per_word = tokens as f64 / words as f64;
        let (system_tokens, turn_tokens) = (args.system_tokens.get(), args.turn_tokens.get());
        ensure!(
            system_tokens >= system,
            "--system-tokens {system_tokens} is too short: the tool definitions and the template have {system} tokens"
        );
        ensure!(
            turn_tokens >= turn,
            "--turn-tokens {turn_tokens} is too short: an empty tool result has {turn} tokens"
        );
        let words = |tokens: usize| (tokens as f64 / tokens_per_word).round() as usize;
        let (system, task) = (words(system_tokens - system), words(turn_tokens));
        Ok(Self { tokens_per_word, system, task, turn: words(turn_tokens - turn) })
    }
}

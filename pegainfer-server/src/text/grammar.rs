//! Structured output: schemas, regular expressions and grammars as masks over the vocabulary, by llguidance.
//!
//! A source may come from a hostile client. [`service`] bounds what it costs: `bounds` refuses sources of which a single step
//! could take for ever, `trial` compiles the rest in a process with limits on time and memory first, and what compiled within
//! them is compiled here, by [`GrammarCompiler`], on one of a few threads.

mod bounds;
mod cache;
mod compiled;
mod error;
mod patterns;
pub mod service;
mod source;
#[cfg(test)]
mod tests;
pub mod trial;

use super::reasoned::{Reasoned, ThinkTokens};
use super::recorded_grammar::{ReasoningLimits, RecordedGrammar};
use super::tokenizer::Tokenizer;
use compiled::Compiled;
pub use error::GrammarError;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use pegainfer_core::grammar::Grammar;
pub use source::{GrammarSource, with_options};
use std::sync::{Arc, OnceLock};

/// Stack size of the thread that compiles, in bytes: llguidance recurses as deep as rules refer to each other.
const COMPILER_STACK: usize = 64 << 20;
/// Parser items in one row: an object takes four for each optional property.
const MAX_ITEMS_IN_ROW: usize = 20_000;
/// Parser items for one mask, of which about 20,000 take a millisecond.
const MAX_ITEMS_PER_MASK: usize = 200_000;
/// Lexer states of one grammar, of 1 to 2 KB each.
const MAX_LEXER_STATES: usize = 50_000;

/// Compiles sources into grammars over one vocabulary.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    think: Option<ThinkTokens>,
    /// Created when first needed: a large vocabulary takes a third of a second.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl GrammarCompiler {
    /// `vocab_size`: number of logits of the model, which the masks are for.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, eos_token_ids: Vec<u32>) -> Self {
        let think = ThinkTokens::of(&tokenizer);
        Self { tokenizer, vocab_size, eos_token_ids, think, factory: OnceLock::new() }
    }

    /// Whether the vocabulary has the reasoning tags, which [`after_reasoning`](Self::after_reasoning) needs.
    pub fn knows_reasoning(&self) -> bool {
        self.think.is_some()
    }

    /// A grammar of reasoning and the output after it, which without a grammar of its own is any text; `None` if the reasoning
    /// tags are not single tokens.
    pub fn after_reasoning(
        &self,
        thinking: ReasoningLimits,
        output: Option<Arc<dyn Grammar>>,
    ) -> Option<Arc<dyn Grammar>> {
        let think = self.think.clone()?;
        Some(Arc::new(Reasoned::new(think, thinking, output, self.vocab_size, &self.eos_token_ids)))
    }

    /// Compiles a source and computes its first mask. Takes milliseconds, for a large schema more.
    ///
    /// # Errors
    /// What is wrong with the source, or that there is no thread.
    pub fn compile(&self, source: GrammarSource) -> Result<Arc<dyn Grammar>, GrammarError> {
        on_large_stack(COMPILER_STACK, || {
            let lark = source.into_lark()?;
            bounds::check(&lark)?;
            self.compile_here(lark)
        })
    }

    /// The grammar that has this [`source`](Grammar::source).
    ///
    /// # Errors
    /// It is no such source, or of a model with other reasoning tags.
    pub fn recorded(&self, source: &str) -> Result<Arc<dyn Grammar>, GrammarError> {
        let foreign = |why: String| GrammarError::Invalid(format!("it was not recorded by this program: {why}"));
        match source.parse().map_err(|error: serde_json::Error| foreign(error.to_string()))? {
            RecordedGrammar::Lark(lark) => self.compile(GrammarSource::Lark(lark)),
            RecordedGrammar::Reasoned { thinking, output } => {
                let output = output.map(|output| self.recorded(&output)).transpose()?;
                let missing = || foreign("the model has no reasoning tags".to_owned());
                self.after_reasoning(thinking, output).ok_or_else(missing)
            }
        }
    }

    /// Compiles a Lark grammar that is within the bounds, on a thread with [`COMPILER_STACK`].
    fn compile_here(&self, lark: String) -> Result<Arc<dyn Grammar>, GrammarError> {
        let factory = self.factory.get_or_init(|| self.create_factory()).as_ref();
        let compiled = compile_with(factory.map_err(|e| GrammarError::Invalid(e.clone()))?, lark, self.vocab_size)?;
        Ok(Arc::new(compiled))
    }

    fn create_factory(&self) -> Result<ParserFactory, String> {
        let Some(&eos) = self.eos_token_ids.first() else {
            return Err("this model has no end-of-text token, so that constrained text could not end".into());
        };
        let words: Vec<Vec<u8>> = (0..self.vocab_size as u32).map(|id| self.word(id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab_size as u32, eos), &words);
        let trie = trie.with_eos_tokens(&self.eos_token_ids);
        create_factory(&(Arc::new(ApproximateTokEnv::new(trie)) as TokEnv))
    }

    /// A token's bytes; control tokens are marked, so that they are not mistaken for their spelling.
    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id);
        match self.tokenizer.is_special(id) {
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat(),
            // The marker byte does not occur in UTF-8.
            false if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
            false => bytes,
        }
    }
}

/// llguidance with our limits over a vocabulary.
fn create_factory(vocabulary: &TokEnv) -> Result<ParserFactory, String> {
    let mut factory = ParserFactory::new_simple(vocabulary).map_err(|e| e.to_string())?;
    let limits = factory.quiet().limits_mut();
    limits.verbose_errors = false;
    limits.max_items_in_row = MAX_ITEMS_IN_ROW;
    limits.step_max_items = MAX_ITEMS_PER_MASK;
    limits.max_lexer_states = MAX_LEXER_STATES;
    Ok(factory)
}

fn compile_with(factory: &ParserFactory, lark: String, vocab_size: usize) -> Result<Compiled, GrammarError> {
    let matcher = llguidance::Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark.clone())));
    Compiled::new(matcher, vocab_size, lark).map_err(GrammarError::Invalid)
}

/// Runs `work`, which recurses deeply, on a thread of its own, and waits for it.
fn on_large_stack<T: Send>(
    stack: usize,
    work: impl FnOnce() -> Result<T, GrammarError> + Send,
) -> Result<T, GrammarError> {
    std::thread::scope(|scope| match thread_with(stack).spawn_scoped(scope, work) {
        Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
        Err(error) => Err(no_thread(error)),
    })
}

fn thread_with(stack: usize) -> std::thread::Builder {
    std::thread::Builder::new().name("grammar".into()).stack_size(stack)
}

fn no_thread(error: std::io::Error) -> GrammarError {
    GrammarError::Busy(format!("no thread can be started to compile it: {error}"))
}

fn panicked() -> GrammarError {
    GrammarError::Invalid("the compiler panicked".into())
}

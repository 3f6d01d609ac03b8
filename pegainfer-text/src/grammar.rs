//! Structured output: schemas, regular expressions and grammars as masks over the vocabulary, with llguidance.
//!
//! A source may come from a hostile client. [`GrammarSource::into_checked_lark`] refuses sources in which a single step
//! could take forever. A server compiles the rest first with [`compile_over_bytes`] in a process with limits on time
//! and memory, then with [`GrammarCompiler::compile_checked`].

mod allowed;
mod bounds;
mod compiled;
mod error;
mod patterns;
mod reasoned;
mod recorded;
mod source;
#[cfg(test)]
mod tests;

use crate::tokenizer::Tokenizer;
pub use allowed::AllowedTokens;
pub use compiled::{CompiledGrammar, CompiledMatcher};
pub use error::GrammarError;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use reasoned::ThinkTokens;
pub use reasoned::{ReasonedGrammar, ReasonedMatcher};
pub use recorded::ReasoningLimits;
use recorded::RecordedGrammar;
pub use source::{GrammarSource, with_options};
use std::sync::{Arc, OnceLock};

/// Stack size of a compiling thread, in bytes: llguidance recurses as deep as rules refer to each other.
pub const COMPILER_STACK: usize = 64 << 20;
/// Maximum parser items in one row: an object takes four per optional property.
const MAX_ITEMS_IN_ROW: usize = 20_000;
/// Maximum parser items for one mask; about 20,000 take a millisecond.
const MAX_ITEMS_PER_MASK: usize = 200_000;
/// Maximum lexer states of one grammar, of 1 to 2 KB each.
const MAX_LEXER_STATES: usize = 50_000;
/// Stack of [`compile_over_bytes`]: smaller, so that a grammar that compiles there also compiles on a usual thread.
const TRIAL_STACK: usize = COMPILER_STACK - (8 << 20);
/// Vocabulary size of [`compile_over_bytes`]: all bytes, and one end-of-text token.
const BYTES: usize = 257;

/// A set of texts, represented by their tokens.
#[derive(Debug, Clone)]
pub enum Grammar {
    /// Compiled from Lark.
    Compiled(Arc<CompiledGrammar>),
    /// Reasoning, then the output.
    Reasoned(ReasonedGrammar),
}

/// A position in a text that follows a [`Grammar`].
#[derive(Clone)]
pub enum Matcher {
    /// Position in a text of a [`CompiledGrammar`].
    Compiled(Box<CompiledMatcher>),
    /// Position in a text of a [`ReasonedGrammar`].
    Reasoned(ReasonedMatcher),
}

impl Grammar {
    /// A matcher at the beginning of a text, and the tokens that may come first.
    pub fn start(&self) -> (Matcher, AllowedTokens) {
        match self {
            Self::Compiled(grammar) => {
                let (matcher, first) = grammar.start();
                (Matcher::Compiled(Box::new(matcher)), first)
            }
            Self::Reasoned(grammar) => {
                let (matcher, first) = grammar.start();
                (Matcher::Reasoned(matcher), first)
            }
        }
    }

    /// The grammar as text, which [`GrammarCompiler::recorded`] turns back into the grammar.
    pub fn source(&self) -> String {
        match self {
            Self::Compiled(grammar) => grammar.source(),
            Self::Reasoned(grammar) => grammar.source(),
        }
    }
}

impl Matcher {
    /// Advances by one token and returns the tokens that may come next.
    ///
    /// # Errors
    /// One sentence: the grammar does not allow the token, or no token can follow it.
    pub fn next(&mut self, token: u32) -> Result<AllowedTokens, String> {
        match self {
            Self::Compiled(matcher) => matcher.next(token),
            Self::Reasoned(matcher) => matcher.next(token),
        }
    }

    /// Advances by one token without computing the mask, which is most of the work.
    ///
    /// # Errors
    /// One sentence: the grammar does not allow the token.
    pub fn consume(&mut self, token: u32) -> Result<(), String> {
        match self {
            Self::Compiled(matcher) => matcher.consume(token),
            Self::Reasoned(matcher) => matcher.consume(token),
        }
    }
}

/// Compiles sources into grammars over one vocabulary.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    think: Option<ThinkTokens>,
    /// Created on first use: a large vocabulary takes a third of a second.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl GrammarCompiler {
    /// A compiler for this tokenizer. `vocab_size` is the model's number of logits, and the size of the masks.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, eos_token_ids: Vec<u32>) -> Self {
        let think = ThinkTokens::find(&tokenizer);
        Self { tokenizer, vocab_size, eos_token_ids, think, factory: OnceLock::new() }
    }

    /// True if the vocabulary has the reasoning tags, which [`after_reasoning`](Self::after_reasoning) needs.
    pub fn has_reasoning_tags(&self) -> bool {
        self.think.is_some()
    }

    /// A grammar of reasoning followed by the output, which is any text if it has no grammar. `None` if the reasoning
    /// tags are not single tokens.
    pub fn after_reasoning(
        &self,
        thinking: ReasoningLimits,
        output: Option<Arc<CompiledGrammar>>,
    ) -> Option<ReasonedGrammar> {
        let think = self.think.clone()?;
        Some(ReasonedGrammar::new(think, thinking, output, self.vocab_size, &self.eos_token_ids))
    }

    /// Compiles a source and computes its first mask. Takes milliseconds, or longer for a large schema.
    ///
    /// # Errors
    /// The source is faulty, or no thread can be started.
    pub fn compile(&self, source: GrammarSource) -> Result<CompiledGrammar, GrammarError> {
        on_large_stack(COMPILER_STACK, || self.compile_checked(source.into_checked_lark()?))
    }

    /// Compiles the result of [`GrammarSource::into_checked_lark`] on the calling thread, which needs a stack of
    /// [`COMPILER_STACK`] bytes.
    ///
    /// # Errors
    /// The source is faulty.
    pub fn compile_checked(&self, lark: String) -> Result<CompiledGrammar, GrammarError> {
        let factory = self.factory.get_or_init(|| self.create_factory()).as_ref();
        compile_with(factory.map_err(|e| GrammarError::Invalid(e.clone()))?, lark, self.vocab_size)
    }

    /// The grammar with this [`source`](Grammar::source).
    ///
    /// # Errors
    /// The text is no such source, or belongs to a model with other reasoning tags.
    pub fn recorded(&self, source: &str) -> Result<Grammar, GrammarError> {
        match recorded(source)? {
            RecordedGrammar::Lark(lark) => self.recorded_lark(lark).map(Grammar::Compiled),
            RecordedGrammar::Reasoned { thinking, output } => {
                let output = output.map(|output| match recorded(&output)? {
                    RecordedGrammar::Lark(lark) => self.recorded_lark(lark),
                    RecordedGrammar::Reasoned { .. } => Err(foreign("it reasons twice")),
                });
                let reasoned = self.after_reasoning(thinking, output.transpose()?);
                reasoned.map(Grammar::Reasoned).ok_or_else(|| foreign("the model has no reasoning tags"))
            }
        }
    }

    fn recorded_lark(&self, lark: String) -> Result<Arc<CompiledGrammar>, GrammarError> {
        self.compile(GrammarSource::Lark(lark)).map(Arc::new)
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

    /// A token's bytes. Control tokens are marked, to distinguish them from their spelling.
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

/// llguidance with our limits, over a vocabulary.
fn create_factory(vocabulary: &TokEnv) -> Result<ParserFactory, String> {
    let mut factory = ParserFactory::new_simple(vocabulary).map_err(|e| e.to_string())?;
    let limits = factory.quiet().limits_mut();
    limits.verbose_errors = false;
    limits.max_items_in_row = MAX_ITEMS_IN_ROW;
    limits.step_max_items = MAX_ITEMS_PER_MASK;
    limits.max_lexer_states = MAX_LEXER_STATES;
    Ok(factory)
}

/// Compiles the result of [`GrammarSource::into_checked_lark`] with the 256 bytes as vocabulary. Except for the masks,
/// it takes as much time and memory as with any other vocabulary.
///
/// # Errors
/// The source is faulty, or no thread can be started.
pub fn compile_over_bytes(lark: String) -> Result<(), GrammarError> {
    on_large_stack(TRIAL_STACK, || {
        let factory = create_factory(&ApproximateTokEnv::single_byte_env()).map_err(GrammarError::Invalid)?;
        compile_with(&factory, lark, BYTES).map(drop)
    })
}

fn recorded(source: &str) -> Result<RecordedGrammar, GrammarError> {
    source.parse().map_err(|error: serde_json::Error| foreign(&error.to_string()))
}

fn foreign(why: &str) -> GrammarError {
    GrammarError::Invalid(format!("it was not recorded by this program: {why}"))
}

fn compile_with(factory: &ParserFactory, lark: String, vocab_size: usize) -> Result<CompiledGrammar, GrammarError> {
    let matcher = llguidance::Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark.clone())));
    CompiledGrammar::new(matcher, vocab_size, lark).map_err(GrammarError::Invalid)
}

/// Runs deeply recursive `work` on a separate thread, and waits for it.
fn on_large_stack<T: Send>(
    stack: usize,
    work: impl FnOnce() -> Result<T, GrammarError> + Send,
) -> Result<T, GrammarError> {
    let thread = std::thread::Builder::new().name("grammar".into()).stack_size(stack);
    std::thread::scope(|scope| match thread.spawn_scoped(scope, work) {
        Ok(thread) => thread.join().unwrap_or_else(|_| Err(GrammarError::panicked())),
        Err(error) => Err(GrammarError::no_thread(&error)),
    })
}

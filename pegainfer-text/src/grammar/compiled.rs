//! A grammar compiled by llguidance.

use super::allowed::AllowedTokens;
use super::recorded::RecordedGrammar;
use llguidance::toktrie::SimpleVob;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A grammar compiled from Lark over one vocabulary.
pub struct CompiledGrammar {
    initial: Mutex<llguidance::Matcher>,
    first: AllowedTokens,
    vocab_size: usize,
    lark: String,
}

impl CompiledGrammar {
    /// Computes the first mask.
    ///
    /// # Errors
    /// One sentence: why the source of the grammar is faulty.
    pub(super) fn new(mut initial: llguidance::Matcher, vocab_size: usize, lark: String) -> Result<Self, String> {
        let first = mask(initial.compute_mask_or_eos(), vocab_size)?;
        Ok(Self { initial: Mutex::new(initial), first, vocab_size, lark })
    }

    /// A matcher at the beginning of a text, and the tokens that may come first.
    pub fn start(&self) -> (CompiledMatcher, AllowedTokens) {
        // The matcher is only cloned, so a panic cannot leave it half-changed.
        let inner = self.initial.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (CompiledMatcher { inner, vocab_size: self.vocab_size }, self.first.clone())
    }

    /// The grammar as text, which [`GrammarCompiler::recorded`](super::GrammarCompiler::recorded) turns back into the
    /// grammar.
    pub fn source(&self) -> String {
        RecordedGrammar::Lark(self.lark.clone()).to_string()
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompiledGrammar")
    }
}

/// A position in a text that follows a [`CompiledGrammar`].
#[derive(Clone)]
pub struct CompiledMatcher {
    inner: llguidance::Matcher,
    vocab_size: usize,
}

impl CompiledMatcher {
    /// Advances by one token and returns the tokens that may come next.
    ///
    /// # Errors
    /// One sentence: the grammar does not allow the token, or no token can follow it.
    pub fn next(&mut self, token: u32) -> Result<AllowedTokens, String> {
        self.consume(token)?;
        mask(self.inner.compute_mask_or_eos(), self.vocab_size)
    }

    /// Advances by one token without computing the mask, which is most of the work.
    ///
    /// # Errors
    /// One sentence: the grammar does not allow the token.
    pub fn consume(&mut self, token: u32) -> Result<(), String> {
        // After its end (`ignore_eos`), a text can only continue with more EOS tokens.
        if self.inner.is_stopped() { Ok(()) } else { self.inner.consume_token(token).map_err(reason) }
    }
}

/// One sentence from llguidance's message.
fn reason(error: impl fmt::Display) -> String {
    let text = error.to_string();
    // The lines after the first describe the library's internal state.
    let line = text.lines().next().unwrap_or_default();
    if line.starts_with("NoExtension") { "no text fits it".to_owned() } else { line.to_owned() }
}

/// Converts llguidance's token set, which has one bit per token, to a mask.
fn mask(tokens: Result<SimpleVob, impl fmt::Display>, vocab_size: usize) -> Result<AllowedTokens, String> {
    let tokens = tokens.map_err(reason)?;
    if tokens.is_zero() {
        return Err("no token can come next".into());
    }
    Ok(AllowedTokens::from_words(tokens.as_slice(), vocab_size))
}

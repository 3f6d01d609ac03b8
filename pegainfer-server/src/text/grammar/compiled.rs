//! A compiled grammar as the engine uses it: a mask over the vocabulary for each step.

use super::super::recorded_grammar::RecordedGrammar;
use llguidance::toktrie::SimpleVob;
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::TokenMask;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A grammar at its beginning.
pub(super) struct Compiled {
    initial: Mutex<llguidance::Matcher>,
    first: Arc<TokenMask>,
    vocab_size: usize,
    lark: String,
}

impl Compiled {
    /// Computes the first mask.
    ///
    /// # Errors
    /// One sentence: what is wrong with the source of the grammar.
    pub(super) fn new(mut initial: llguidance::Matcher, vocab_size: usize, lark: String) -> Result<Self, String> {
        let first = mask(initial.compute_mask_or_eos(), vocab_size)?;
        Ok(Self { initial: Mutex::new(initial), first, vocab_size, lark })
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl Grammar for Compiled {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        // The matcher is only cloned: a panic cannot leave it half-changed.
        let inner = self.initial.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (Box::new(CompiledMatcher { inner, vocab_size: self.vocab_size }), self.first.clone())
    }

    fn source(&self) -> String {
        RecordedGrammar::Lark(self.lark.clone()).to_string()
    }
}

/// Position of one text in the grammar.
struct CompiledMatcher {
    inner: llguidance::Matcher,
    vocab_size: usize,
}

impl Matcher for CompiledMatcher {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.consume(token)?;
        mask(self.inner.compute_mask_or_eos(), self.vocab_size)
    }

    fn consume(&mut self, token: u32) -> Result<(), String> {
        // After its end (`ignore_eos`), a text can only continue with more EOS tokens.
        if self.inner.is_stopped() { Ok(()) } else { self.inner.consume_token(token).map_err(reason) }
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(Self { inner: self.inner.clone(), vocab_size: self.vocab_size }))
    }
}

/// One sentence of what llguidance says.
fn reason(error: impl fmt::Display) -> String {
    let text = error.to_string();
    // The lines after the first describe the library's internal state.
    let line = text.lines().next().unwrap_or_default();
    if line.starts_with("NoExtension") { "no text fits it".to_owned() } else { line.to_owned() }
}

/// Converts llguidance's token set, which has one bit per token, to a mask.
fn mask(tokens: Result<SimpleVob, impl fmt::Display>, vocab_size: usize) -> Result<Arc<TokenMask>, String> {
    let tokens = tokens.map_err(reason)?;
    if tokens.is_zero() {
        return Err("no token can come next".into());
    }
    let mut words = tokens.as_slice().to_vec();
    words.resize(vocab_size.div_ceil(32), 0);
    Ok(Arc::new(TokenMask::from_words(words)))
}

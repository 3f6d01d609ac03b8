//! A compiled grammar as the engine uses it: masks over the vocabulary.

use llguidance::Matcher as Parser;
use llguidance::toktrie::SimpleVob;
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::rules::TokenMask;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A grammar at its beginning.
pub(super) struct Compiled {
    parser: Mutex<Parser>,
    first: Arc<TokenMask>,
    vocab_size: usize,
}

impl Compiled {
    /// # Errors
    /// What is wrong with the source of the grammar, in one sentence.
    pub(super) fn new(mut parser: Parser, vocab_size: usize) -> Result<Self, String> {
        let first = mask(parser.compute_mask_or_eos(), vocab_size)?;
        Ok(Self { parser: Mutex::new(parser), first, vocab_size })
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl Grammar for Compiled {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        // Only cloned: a panic cannot leave it half-changed.
        let parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (Box::new(Place { parser, vocab_size: self.vocab_size }), self.first.clone())
    }
}

/// How far a text has come.
struct Place {
    parser: Parser,
    vocab_size: usize,
}

impl Matcher for Place {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        // Past its end (`ignore_eos`) a text has only more ends.
        let taken = if self.parser.is_stopped() { Ok(()) } else { self.parser.consume_token(token) };
        mask(taken.and_then(|()| self.parser.compute_mask_or_eos()), self.vocab_size)
    }
}

/// The tokens of a set, which has one bit for each, as a mask.
fn mask(tokens: Result<SimpleVob, impl fmt::Display>, vocab_size: usize) -> Result<Arc<TokenMask>, String> {
    let tokens = tokens.map_err(|e| {
        let text = e.to_string();
        // What follows a line break is the library's inner state.
        let line = text.lines().next().unwrap_or_default();
        if line.starts_with("NoExtension") { "no text fits it".to_owned() } else { line.to_owned() }
    })?;
    if tokens.is_zero() {
        return Err("no token can come next".into());
    }
    let mut words = tokens.as_slice().to_vec();
    words.resize(vocab_size.div_ceil(32), 0);
    Ok(Arc::new(TokenMask::from_words(words)))
}

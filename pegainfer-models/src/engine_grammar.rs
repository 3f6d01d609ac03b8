//! pegainfer-text's grammars in the form that an engine uses.

use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::TokenMask;
use pegainfer_text::AllowedTokens;
use std::fmt;
use std::sync::Arc;

/// A grammar for an engine. `Kept` stays alive as long as the engine uses the grammar.
pub struct EngineGrammar<Kept = ()> {
    grammar: pegainfer_text::Grammar,
    _kept: Kept,
}

impl EngineGrammar {
    /// A grammar that keeps nothing else alive.
    pub fn new(grammar: pegainfer_text::Grammar) -> Self {
        Self { grammar, _kept: () }
    }
}

impl<Kept> EngineGrammar<Kept> {
    /// A grammar that keeps `kept`, such as permits for its memory.
    pub fn keeping(grammar: pegainfer_text::Grammar, kept: Kept) -> Self {
        Self { grammar, _kept: kept }
    }
}

impl<Kept: Send + Sync> Grammar for EngineGrammar<Kept> {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        let (matcher, first) = self.grammar.start();
        (Box::new(EngineMatcher(matcher)), mask(&first))
    }

    fn source(&self) -> String {
        self.grammar.source()
    }
}

impl<Kept> fmt::Debug for EngineGrammar<Kept> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.grammar.fmt(f)
    }
}

struct EngineMatcher(pegainfer_text::Matcher);

impl Matcher for EngineMatcher {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.0.next(token).map(|allowed| mask(&allowed))
    }

    fn consume(&mut self, token: u32) -> Result<(), String> {
        self.0.consume(token)
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(Self(self.0.clone())))
    }
}

/// The same words, without a copy.
fn mask(allowed: &AllowedTokens) -> Arc<TokenMask> {
    Arc::new(TokenMask::from_words(allowed.words().clone()))
}

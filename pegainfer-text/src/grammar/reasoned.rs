//! A grammar for text after reasoning, and the reasoning budget. The output grammar applies after `</think>`.

use super::allowed::AllowedTokens;
use super::compiled::{CompiledGrammar, CompiledMatcher};
use super::recorded::{ReasoningLimits, RecordedGrammar};
use crate::parser::{CALL_OPEN, ReasoningStart, THINK_CLOSE, THINK_OPEN};
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// Maximum number of line-break tokens between the reasoning and the output. Templates write one or two there, and the
/// parser drops them.
const MAX_BREAKS: usize = 2;

/// Token ids of the reasoning tags, each of which is one token.
#[derive(Debug, Clone)]
pub struct ThinkTokens {
    open: u32,
    close: u32,
    call: Option<u32>,
    breaks: Vec<u32>,
}

impl ThinkTokens {
    /// Looks up the tags; `None` if a tag takes several tokens.
    pub fn find(tokenizer: &Tokenizer) -> Option<Self> {
        let one = |text: &str| match tokenizer.encode(text, false).as_deref() {
            Ok([id]) => Some(*id),
            _ => None,
        };
        let breaks = ["\n", "\n\n", "\n\n\n"].into_iter().filter_map(one).collect();
        Some(Self { open: one(THINK_OPEN)?, close: one(THINK_CLOSE)?, call: one(CALL_OPEN), breaks })
    }
}

/// A grammar of reasoning and the output after it, which may have its own grammar. Clones share it.
#[derive(Debug, Clone)]
pub struct ReasonedGrammar(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tokens: ThinkTokens,
    thinking: ReasoningLimits,
    output: Option<Arc<CompiledGrammar>>,
    /// Mask inside the reasoning. If an output grammar follows, the mask excludes EOS and calls, which would skip the
    /// output.
    inside: AllowedTokens,
    /// Mask when the budget is used up: only `</think>`.
    close: AllowedTokens,
    /// Mask at the start: the output's first tokens, and `<think>`.
    first: AllowedTokens,
    /// Mask after `</think>`: the output's first tokens, and line breaks.
    closed: AllowedTokens,
    /// Mask of the output's first tokens.
    plain: AllowedTokens,
}

impl ReasonedGrammar {
    /// A grammar of reasoning, then `output`; `None` allows any output. `ends` are the token ids that end a text (EOS).
    pub(super) fn new(
        tokens: ThinkTokens,
        thinking: ReasoningLimits,
        output: Option<Arc<CompiledGrammar>>,
        vocab_size: usize,
        ends: &[u32],
    ) -> Self {
        let call = tokens.call.filter(|_| thinking.call_ends_it);
        let kept = |id: &u32| output.is_none() || !(ends.contains(id) || call == Some(*id));
        let inside: Vec<u32> = (0..vocab_size as u32).filter(kept).collect();
        let inside = AllowedTokens::new(&inside, vocab_size);
        // Without an output grammar, `inside` excludes nothing: the output may also be any text.
        let plain = output.as_ref().map_or_else(|| inside.clone(), |output| output.start().1);
        Self(Arc::new(Shared {
            close: AllowedTokens::new(&[tokens.close], vocab_size),
            first: plain.with(&[tokens.open]),
            closed: plain.with(&tokens.breaks),
            tokens,
            thinking,
            output,
            inside,
            plain,
        }))
    }
}

impl Shared {
    /// State and mask inside the reasoning, after `used` reasoning tokens.
    fn reasoning(&self, used: usize) -> (State, AllowedTokens) {
        let out = self.thinking.budget == Some(used);
        (State::Reasoning(used), if out { self.close.clone() } else { self.inside.clone() })
    }

    /// State and mask after the first token of the output.
    fn output(&self, token: u32) -> Result<(State, AllowedTokens), String> {
        let Some(output) = &self.output else { return Ok((State::Free, self.plain.clone())) };
        let (mut matcher, _) = output.start();
        let mask = matcher.next(token)?;
        Ok((State::Output(Box::new(matcher)), mask))
    }
}

impl ReasonedGrammar {
    /// A matcher at the beginning of a text, and the tokens that may come first.
    pub fn start(&self) -> (ReasonedMatcher, AllowedTokens) {
        let shared = self.0.clone();
        let (state, mask) = match shared.thinking.start {
            ReasoningStart::Opened => shared.reasoning(0),
            ReasoningStart::IfOpened | ReasoningStart::Never => (State::Start, shared.first.clone()),
        };
        (ReasonedMatcher { shared, state }, mask)
    }

    /// The grammar as text, which [`GrammarCompiler::recorded`](super::GrammarCompiler::recorded) turns back into the
    /// grammar.
    pub fn source(&self) -> String {
        let Shared { thinking, output, .. } = &*self.0;
        RecordedGrammar::Reasoned { thinking: *thinking, output: output.as_ref().map(|output| output.source()) }
            .to_string()
    }
}

/// A position in a text that follows a [`ReasonedGrammar`].
#[derive(Clone)]
pub struct ReasonedMatcher {
    shared: Arc<Shared>,
    state: State,
}

#[derive(Clone)]
enum State {
    /// Before an optional `<think>`.
    Start,
    /// Inside the reasoning, after this many of its tokens.
    Reasoning(usize),
    /// After `</think>` and this many line-break tokens.
    Closed(usize),
    /// In the output, which has a grammar.
    Output(Box<CompiledMatcher>),
    /// In the output, which has no grammar.
    Free,
}

impl ReasonedMatcher {
    /// Advances by one token and returns the tokens that may come next.
    ///
    /// # Errors
    /// One sentence: the output's grammar does not allow the token, or no token can follow it.
    pub fn next(&mut self, token: u32) -> Result<AllowedTokens, String> {
        let shared = &*self.shared;
        let ThinkTokens { open, close, call, breaks } = &shared.tokens;
        let (state, mask) = match &mut self.state {
            State::Output(matcher) => return matcher.next(token),
            State::Free => return Ok(shared.plain.clone()),
            State::Start if token == *open => shared.reasoning(0),
            State::Start if shared.output.is_none() && breaks.contains(&token) => (State::Start, shared.first.clone()),
            State::Reasoning(_) if token == *close => (State::Closed(0), shared.closed.clone()),
            State::Reasoning(_) if shared.thinking.call_ends_it && *call == Some(token) => shared.output(token)?,
            State::Reasoning(used) => shared.reasoning(*used + 1),
            State::Closed(n) if *n < MAX_BREAKS && breaks.contains(&token) => {
                let mask = if *n + 1 == MAX_BREAKS { &shared.plain } else { &shared.closed };
                (State::Closed(*n + 1), mask.clone())
            }
            State::Start | State::Closed(_) => shared.output(token)?,
        };
        self.state = state;
        Ok(mask)
    }

    /// Advances by one token without computing a mask of the output's grammar.
    ///
    /// # Errors
    /// One sentence: the output's grammar does not allow the token.
    pub fn consume(&mut self, token: u32) -> Result<(), String> {
        match &mut self.state {
            State::Output(matcher) => matcher.consume(token),
            _ => self.next(token).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GrammarCompiler, GrammarSource};
    use pegainfer_testing as testing;

    const EOS: [u32; 2] = [4089, 4087];

    /// Two flags: the grammar allows the text, and the text may end there.
    fn accepts(start: ReasoningStart, call_ends_it: bool, text: &str) -> (bool, bool) {
        let tokenizer = Arc::new(Tokenizer::load(&testing::model_dir()).unwrap());
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4100, EOS.to_vec());
        let output = compiler.compile(GrammarSource::Regex("[ab]+".into())).unwrap();
        let thinking = ReasoningLimits { start, call_ends_it, budget: None };
        let grammar = compiler.after_reasoning(thinking, Some(Arc::new(output))).unwrap();
        let (mut matcher, mut mask) = grammar.start();
        for id in tokenizer.encode(text, false).unwrap() {
            if !mask.allows(id) {
                return (false, false);
            }
            mask = matcher.next(id).unwrap();
        }
        (true, mask.allows(EOS[0]) && mask.allows(EOS[1]))
    }

    #[test]
    fn the_grammar_applies_after_the_reasoning() {
        use ReasoningStart::{IfOpened, Opened};
        for (start, text, expected) in [
            (Opened, "Once upon a time", (true, false)),
            (Opened, "Hm, <think>\n</think>\n\nabba", (true, true)),
            (Opened, "Hm.\n</think>ab", (true, true)),
            (Opened, "</think>\nab", (true, true)),
            (Opened, "</think>\n\n", (true, false)),
            (Opened, "</think>\n\n\n\n\n\n\n\nab", (false, false)),
            (Opened, "</think>\n\nabc", (false, false)),
            (Opened, "</think>\n\na\nb", (false, false)),
            (Opened, "</think></think>", (false, false)),
            (IfOpened, "abba", (true, true)),
            (IfOpened, "<think>\nHm.\n</think>\n\nab", (true, true)),
            (IfOpened, "<think>\nHm.", (true, false)),
            (IfOpened, "Hm.", (false, false)),
            (IfOpened, "\n<think>", (false, false)),
            (IfOpened, "ab<think>", (false, false)),
        ] {
            assert_eq!(accepts(start, false, text), expected, "{start:?} {text:?}");
        }
        assert_eq!(accepts(Opened, false, "x <tool_call>"), (true, false));
        assert_eq!(accepts(Opened, true, "x <tool_call>"), (false, false), "it would begin a call");
    }

    /// Token positions in a text at which only `</think>` is allowed.
    fn forced(start: ReasoningStart, call_ends_it: bool, budget: usize, text: &str) -> Vec<usize> {
        let tokenizer = Arc::new(Tokenizer::load(&testing::model_dir()).unwrap());
        let close = tokenizer.encode("</think>", false).unwrap()[0];
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4100, EOS.to_vec());
        let thinking = ReasoningLimits { start, call_ends_it, budget: Some(budget) };
        let (mut matcher, mut mask) = compiler.after_reasoning(thinking, None).unwrap().start();
        let mut forced = Vec::new();
        for (i, id) in tokenizer.encode(text, false).unwrap().into_iter().enumerate() {
            let allowed: u32 = mask.words().iter().map(|word| word.count_ones()).sum();
            match allowed {
                1 => forced.push(i),
                _ => assert_eq!(allowed, 4100, "before token {i} of {text:?}"),
            }
            assert!(allowed > 1 || (mask.allows(close) && id == close), "before token {i} of {text:?}");
            mask = matcher.next(id).unwrap();
        }
        forced
    }

    #[test]
    fn a_budget_forces_the_end_and_nothing_else() {
        use ReasoningStart::{IfOpened, Opened};
        for (start, budget, text, expected) in [
            (Opened, 0, "</think>\n\nany thing </think> at all", vec![0]),
            (Opened, 2, " the cat</think> sat", vec![2]),
            (Opened, 9, " the cat</think> sat on the mat and sat and sat", vec![]),
            (IfOpened, 1, "<think> the</think> cat", vec![2]),
            (IfOpened, 1, "\n<think> the</think> cat", vec![3]),
            (IfOpened, 1, " the<think> cat sat on the mat", vec![]),
        ] {
            assert_eq!(forced(start, false, budget, text), expected, "{start:?} {budget} {text:?}");
        }
        assert!(forced(Opened, true, 2, " the<tool_call> cat sat on").is_empty(), "a call is not reasoning");
    }
}

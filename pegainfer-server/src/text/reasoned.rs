//! A grammar for text after reasoning, and the reasoning budget: the output grammar applies from `</think>` on.

use super::parser::{CALL_OPEN, ReasoningStart, THINK_CLOSE, THINK_OPEN};
use super::recorded_grammar::{ReasoningLimits, RecordedGrammar};
use super::tokenizer::Tokenizer;
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::TokenMask;
use std::sync::Arc;

/// Maximum number of line-break tokens between the reasoning and the output. Templates write one or two there, and the
/// parser drops them.
const MAX_BREAKS: usize = 2;

/// Token ids of the reasoning tags, in a vocabulary where each tag is one token.
#[derive(Debug, Clone)]
pub struct ThinkTokens {
    open: u32,
    close: u32,
    call: Option<u32>,
    breaks: Vec<u32>,
}

impl ThinkTokens {
    /// Looks the tags up; `None` if a tag takes several tokens.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let one = |text: &str| match tokenizer.encode(text, false).as_deref() {
            Ok([id]) => Some(*id),
            _ => None,
        };
        let breaks = ["\n", "\n\n", "\n\n\n"].into_iter().filter_map(one).collect();
        Some(Self { open: one(THINK_OPEN)?, close: one(THINK_CLOSE)?, call: one(CALL_OPEN), breaks })
    }
}

/// A grammar of reasoning, then a text of the grammar `output`, or any text if there is none.
#[derive(Debug)]
pub struct Reasoned(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tokens: ThinkTokens,
    thinking: ReasoningLimits,
    output: Option<Arc<dyn Grammar>>,
    /// Mask inside the reasoning. If an output grammar follows, it excludes EOS and calls, which would skip the output.
    inside: Arc<TokenMask>,
    /// Mask where the budget is used up: only `</think>`.
    close: Arc<TokenMask>,
    /// Mask at the start: the output's first tokens, and `<think>`.
    first: Arc<TokenMask>,
    /// Mask after `</think>`: the output's first tokens, and line breaks.
    closed: Arc<TokenMask>,
    /// Mask of the output's first tokens.
    plain: Arc<TokenMask>,
}

impl Reasoned {
    /// `ends`: the token ids that end a text (EOS).
    pub fn new(
        tokens: ThinkTokens,
        thinking: ReasoningLimits,
        output: Option<Arc<dyn Grammar>>,
        vocab_size: usize,
        ends: &[u32],
    ) -> Self {
        let call = tokens.call.filter(|_| thinking.call_ends_it);
        let kept = |id: &u32| output.is_none() || !(ends.contains(id) || call == Some(*id));
        let inside: Vec<u32> = (0..vocab_size as u32).filter(kept).collect();
        let inside = Arc::new(TokenMask::new(&inside, vocab_size));
        // Without an output grammar, `inside` excludes nothing: the output may be any text, too.
        let plain = output.as_ref().map_or_else(|| inside.clone(), |output| output.start().1);
        Self(Arc::new(Shared {
            close: Arc::new(TokenMask::new(&[tokens.close], vocab_size)),
            first: Arc::new(with(&plain, &[tokens.open])),
            closed: Arc::new(with(&plain, &tokens.breaks)),
            tokens,
            thinking,
            output,
            inside,
            plain,
        }))
    }
}

/// The mask with `ids` allowed in addition.
fn with(mask: &TokenMask, ids: &[u32]) -> TokenMask {
    let mut words = mask.words().to_vec();
    ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
    TokenMask::from_words(words)
}

impl Shared {
    /// State and mask inside the reasoning, after `used` reasoning tokens.
    fn reasoning(&self, used: usize) -> (State, Arc<TokenMask>) {
        let out = self.thinking.budget == Some(used);
        (State::Reasoning(used), if out { self.close.clone() } else { self.inside.clone() })
    }

    /// State and mask after the first token of the output.
    fn output(&self, token: u32) -> Result<(State, Arc<TokenMask>), String> {
        let Some(output) = &self.output else { return Ok((State::Free, self.plain.clone())) };
        let (mut matcher, _) = output.start();
        let mask = matcher.next(token)?;
        Ok((State::Output(matcher), mask))
    }
}

impl Grammar for Reasoned {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        let shared = self.0.clone();
        let (state, mask) = match shared.thinking.start {
            ReasoningStart::Opened => shared.reasoning(0),
            ReasoningStart::IfOpened | ReasoningStart::Never => (State::Start, shared.first.clone()),
        };
        (Box::new(ReasonedMatcher { shared, state }), mask)
    }

    fn source(&self) -> String {
        let Shared { thinking, output, .. } = &*self.0;
        RecordedGrammar::Reasoned { thinking: *thinking, output: output.as_ref().map(|output| output.source()) }
            .to_string()
    }
}

/// Position in a text of [`Reasoned`].
struct ReasonedMatcher {
    shared: Arc<Shared>,
    state: State,
}

enum State {
    /// Before an optional `<think>`.
    Start,
    /// Inside the reasoning, after this many of its tokens.
    Reasoning(usize),
    /// After `</think>` and this many line-break tokens.
    Closed(usize),
    /// In the output, which has a grammar.
    Output(Box<dyn Matcher>),
    /// In the output, which has no grammar.
    Free,
}

impl Matcher for ReasonedMatcher {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
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

    fn consume(&mut self, token: u32) -> Result<(), String> {
        match &mut self.state {
            State::Output(matcher) => matcher.consume(token),
            _ => self.next(token).map(drop),
        }
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        let state = match &self.state {
            State::Start => State::Start,
            State::Reasoning(used) => State::Reasoning(*used),
            State::Closed(breaks) => State::Closed(*breaks),
            State::Output(matcher) => State::Output(matcher.fork()?),
            State::Free => State::Free,
        };
        Some(Box::new(Self { shared: self.shared.clone(), state }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use crate::text::{GrammarCompiler, GrammarSource};

    const EOS: [u32; 2] = [4089, 4087];

    fn allows(mask: &TokenMask, id: u32) -> bool {
        mask.words()[id as usize / 32] >> (id % 32) & 1 == 1
    }

    /// Whether the grammar allows the text, and whether the text may end there.
    fn accepts(start: ReasoningStart, call_ends_it: bool, text: &str) -> (bool, bool) {
        let tokenizer = Arc::new(testing::tokenizer());
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4100, EOS.to_vec());
        let output = compiler.compile(GrammarSource::Regex("[ab]+".into())).unwrap();
        let thinking = ReasoningLimits { start, call_ends_it, budget: None };
        let grammar = compiler.after_reasoning(thinking, Some(output)).unwrap();
        let (mut matcher, mut mask) = grammar.start();
        for id in tokenizer.encode(text, false).unwrap() {
            if !allows(&mask, id) {
                return (false, false);
            }
            mask = matcher.next(id).unwrap();
        }
        (true, allows(&mask, EOS[0]) && allows(&mask, EOS[1]))
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

    /// Indices of the tokens of a text before which only `</think>` is allowed.
    fn forced(start: ReasoningStart, call_ends_it: bool, budget: usize, text: &str) -> Vec<usize> {
        let tokenizer = Arc::new(testing::tokenizer());
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
            assert!(allowed > 1 || (allows(&mask, close) && id == close), "before token {i} of {text:?}");
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

//! Reasoning before a text of a grammar, and its length: the grammar holds from `</think>` on.

use super::parser::{CALL_OPEN, ReasoningStart, THINK_CLOSE, THINK_OPEN};
use super::tokenizer::Tokenizer;
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::rules::TokenMask;
use std::sync::Arc;

/// Tokens of line breaks that may stand between the reasoning and the answer. Templates write one or two there, and the
/// parser drops them.
const MAX_BREAKS: usize = 2;

/// The tags around reasoning, in a vocabulary where each is one token.
#[derive(Debug, Clone)]
pub struct ThinkTokens {
    open: u32,
    close: u32,
    call: Option<u32>,
    breaks: Vec<u32>,
}

impl ThinkTokens {
    /// `None` if a tag takes several tokens.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let one = |text: &str| match tokenizer.encode(text, false).as_deref() {
            Ok([id]) => Some(*id),
            _ => None,
        };
        let breaks = ["\n", "\n\n", "\n\n\n"].into_iter().filter_map(one).collect();
        Some(Self { open: one(THINK_OPEN)?, close: one(THINK_CLOSE)?, call: one(CALL_OPEN), breaks })
    }
}

/// How a model reasons before its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thinking {
    /// Whether the prompt has begun the reasoning, or the model may.
    pub start: ReasoningStart,
    /// A call ends the reasoning, too, as Qwen3.5 may write it.
    pub call_ends_it: bool,
    /// Tokens between the tags at most; then `</think>` is the only token that may come.
    pub budget: Option<usize>,
}

/// Reasoning, then a text of `answer`, or any text.
#[derive(Debug)]
pub struct Reasoned(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tokens: ThinkTokens,
    thinking: Thinking,
    answer: Option<Arc<dyn Grammar>>,
    /// Of the reasoning. Before an answer that has to come, it holds nothing that would take its place.
    inside: Arc<TokenMask>,
    /// Where the budget is used up.
    close: Arc<TokenMask>,
    /// Of the beginning: the answer's, and `<think>`.
    first: Arc<TokenMask>,
    /// After `</think>`: the answer's, and line breaks.
    closed: Arc<TokenMask>,
    /// Of the answer.
    plain: Arc<TokenMask>,
}

impl Reasoned {
    /// `ends`: the tokens that end a text.
    pub fn new(
        tokens: ThinkTokens,
        thinking: Thinking,
        answer: Option<Arc<dyn Grammar>>,
        vocab_size: usize,
        ends: &[u32],
    ) -> Self {
        let call = tokens.call.filter(|_| thinking.call_ends_it);
        let kept = |id: &u32| answer.is_none() || !(ends.contains(id) || call == Some(*id));
        let inside: Vec<u32> = (0..vocab_size as u32).filter(kept).collect();
        let inside = Arc::new(TokenMask::new(&inside, vocab_size));
        // Without a grammar for the answer, nothing was left out: it may be any text, too.
        let plain = answer.as_ref().map_or_else(|| inside.clone(), |answer| answer.start().1);
        Self(Arc::new(Shared {
            close: Arc::new(TokenMask::new(&[tokens.close], vocab_size)),
            first: Arc::new(with(&plain, &[tokens.open])),
            closed: Arc::new(with(&plain, &tokens.breaks)),
            tokens,
            thinking,
            answer,
            inside,
            plain,
        }))
    }
}

/// A mask that allows `ids`, too.
fn with(mask: &TokenMask, ids: &[u32]) -> TokenMask {
    let mut words = mask.words().to_vec();
    ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
    TokenMask::from_words(words)
}

impl Shared {
    /// Inside the reasoning, after so many tokens.
    fn reasoning(&self, used: usize) -> (At, Arc<TokenMask>) {
        let out = self.thinking.budget == Some(used);
        (At::Reasoning(used), if out { self.close.clone() } else { self.inside.clone() })
    }

    /// After the first token of the answer.
    fn answer(&self, token: u32) -> Result<(At, Arc<TokenMask>), String> {
        let Some(answer) = &self.answer else { return Ok((At::Free, self.plain.clone())) };
        let (mut matcher, _) = answer.start();
        let mask = matcher.next(token)?;
        Ok((At::Answer(matcher), mask))
    }
}

impl Grammar for Reasoned {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        let shared = self.0.clone();
        let (at, mask) = match shared.thinking.start {
            ReasoningStart::Opened => shared.reasoning(0),
            ReasoningStart::IfOpened | ReasoningStart::Never => (At::Start, shared.first.clone()),
        };
        (Box::new(Place { shared, at }), mask)
    }
}

struct Place {
    shared: Arc<Shared>,
    at: At,
}

enum At {
    /// Before `<think>`, if it comes.
    Start,
    /// After so many tokens of it.
    Reasoning(usize),
    /// After `</think>` and so many tokens of line breaks.
    Closed(usize),
    Answer(Box<dyn Matcher>),
    Free,
}

impl Matcher for Place {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        let shared = &*self.shared;
        let ThinkTokens { open, close, call, breaks } = &shared.tokens;
        let (at, mask) = match &mut self.at {
            At::Answer(matcher) => return matcher.next(token),
            At::Free => return Ok(shared.plain.clone()),
            At::Start if token == *open => shared.reasoning(0),
            At::Start if shared.answer.is_none() && breaks.contains(&token) => (At::Start, shared.first.clone()),
            At::Reasoning(_) if token == *close => (At::Closed(0), shared.closed.clone()),
            At::Reasoning(_) if shared.thinking.call_ends_it && *call == Some(token) => shared.answer(token)?,
            At::Reasoning(used) => shared.reasoning(*used + 1),
            At::Closed(n) if *n < MAX_BREAKS && breaks.contains(&token) => {
                let mask = if *n + 1 == MAX_BREAKS { &shared.plain } else { &shared.closed };
                (At::Closed(*n + 1), mask.clone())
            }
            At::Start | At::Closed(_) => shared.answer(token)?,
        };
        self.at = at;
        Ok(mask)
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

    /// Whether the text may be written, and whether it may end there.
    fn takes(start: ReasoningStart, call_ends_it: bool, text: &str) -> (bool, bool) {
        let tokenizer = Arc::new(testing::tokenizer());
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4100, EOS.to_vec());
        let answer = compiler.compile(GrammarSource::Regex("[ab]+".into())).unwrap();
        let thinking = Thinking { start, call_ends_it, budget: None };
        let grammar = compiler.after_reasoning(thinking, Some(answer)).unwrap();
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
    fn the_grammar_holds_after_the_reasoning() {
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
            assert_eq!(takes(start, false, text), expected, "{start:?} {text:?}");
        }
        assert_eq!(takes(Opened, false, "x <tool_call>"), (true, false));
        assert_eq!(takes(Opened, true, "x <tool_call>"), (false, false), "it would begin a call");
    }

    /// Where in a text only `</think>` may come: before which of its tokens.
    fn forced(start: ReasoningStart, call_ends_it: bool, budget: usize, text: &str) -> Vec<usize> {
        let tokenizer = Arc::new(testing::tokenizer());
        let close = tokenizer.encode("</think>", false).unwrap()[0];
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4100, EOS.to_vec());
        let thinking = Thinking { start, call_ends_it, budget: Some(budget) };
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
        assert!(forced(Opened, true, 2, " the<tool_call> cat sat on").is_empty(), "a call is no reasoning");
    }
}

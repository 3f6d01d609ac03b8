//! Reasoning before a text of a grammar: the grammar holds from `</think>` on.

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
    /// A call would end the reasoning, see [`ReasoningStart`]'s parser: none may begin inside it.
    pub call_ends_it: bool,
}

/// Reasoning, then a text of `answer`.
#[derive(Debug)]
pub struct Reasoned(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tokens: ThinkTokens,
    start: ReasoningStart,
    answer: Arc<dyn Grammar>,
    /// Of the reasoning: all that does not end the text.
    thinking: Arc<TokenMask>,
    /// Of the beginning: the answer's, and `<think>`.
    first: Arc<TokenMask>,
    /// After `</think>`: the answer's, and line breaks.
    closed: Arc<TokenMask>,
}

impl Reasoned {
    /// `ends`: the tokens that end a text.
    pub fn new(
        tokens: ThinkTokens,
        thinking: Thinking,
        answer: Arc<dyn Grammar>,
        vocab_size: usize,
        ends: &[u32],
    ) -> Self {
        let call = tokens.call.filter(|_| thinking.call_ends_it);
        let inside = (0..vocab_size as u32).filter(|id| !ends.contains(id) && call != Some(*id));
        let inside: Vec<u32> = inside.collect();
        let (_, first) = answer.start();
        Self(Arc::new(Shared {
            start: thinking.start,
            thinking: Arc::new(TokenMask::new(&inside, vocab_size)),
            first: Arc::new(with(&first, &[tokens.open])),
            closed: Arc::new(with(&first, &tokens.breaks)),
            tokens,
            answer,
        }))
    }
}

/// A mask that allows `ids`, too.
fn with(mask: &TokenMask, ids: &[u32]) -> TokenMask {
    let mut words = mask.words().to_vec();
    ids.iter().for_each(|id| words[*id as usize / 32] |= 1 << (id % 32));
    TokenMask::from_words(words)
}

impl Grammar for Reasoned {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        let shared = self.0.clone();
        let (at, mask) = match shared.start {
            ReasoningStart::Opened => (At::Reasoning, shared.thinking.clone()),
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
    Reasoning,
    /// After `</think>` and so many tokens of line breaks.
    Closed(usize),
    Answer(Box<dyn Matcher>),
}

impl Matcher for Place {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        let shared = &*self.shared;
        let (at, mask) = match &mut self.at {
            At::Answer(matcher) => return matcher.next(token),
            At::Start if token == shared.tokens.open => (At::Reasoning, shared.thinking.clone()),
            At::Reasoning if token == shared.tokens.close => (At::Closed(0), shared.closed.clone()),
            At::Reasoning => (At::Reasoning, shared.thinking.clone()),
            At::Closed(breaks) if *breaks < MAX_BREAKS && shared.tokens.breaks.contains(&token) => {
                let last = *breaks + 1 == MAX_BREAKS;
                (At::Closed(*breaks + 1), if last { shared.answer.start().1 } else { shared.closed.clone() })
            }
            At::Start | At::Closed(_) => {
                let (mut matcher, _) = shared.answer.start();
                let mask = matcher.next(token)?;
                (At::Answer(matcher), mask)
            }
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
        let grammar = compiler.after_reasoning(Thinking { start, call_ends_it }, answer).unwrap();
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
}

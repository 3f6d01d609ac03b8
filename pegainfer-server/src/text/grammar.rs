//! Structured output: schemas, regular expressions and grammars as masks over the vocabulary, by llguidance.

mod compiled;
mod source;

use super::reasoned::{Reasoned, ReasoningLimits, ThinkTokens};
use super::tokenizer::Tokenizer;
use compiled::Compiled;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use pegainfer_core::grammar::Grammar;
pub use source::{GrammarSource, with_options};
use std::sync::{Arc, OnceLock};

/// Maximum size of a source, in bytes.
const MAX_SOURCE: usize = 512 << 10;
/// Stack size of the compiler thread in bytes: the compiler recurses as deep as rules refer to each other. Sources within
/// the limits use part of it; pages that are not touched take no memory.
const COMPILER_STACK: usize = 1 << 30;

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

    /// Compiles a source. Takes milliseconds, for a large schema more.
    ///
    /// # Errors
    /// One sentence: what is wrong with the source.
    pub fn compile(&self, source: GrammarSource) -> Result<Arc<dyn Grammar>, String> {
        if source.bytes() > MAX_SOURCE {
            return Err(format!("it has {} bytes, at most {MAX_SOURCE} are compiled", source.bytes()));
        }
        std::thread::scope(|scope| {
            let compiler = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILER_STACK);
            let compiler = compiler.spawn_scoped(scope, || self.compile_here(source));
            let compiled = compiler.map_err(|e| format!("there is no thread to compile it: {e}"))?.join();
            compiled.unwrap_or_else(|_| Err("the compiler panicked".into()))
        })
    }

    fn compile_here(&self, source: GrammarSource) -> Result<Arc<dyn Grammar>, String> {
        let factory = self.factory.get_or_init(|| self.create_factory()).as_ref().map_err(Clone::clone)?;
        let grammar = match source {
            GrammarSource::Lark(grammar) => grammar,
            // Other sources are one rule.
            source => format!("start: {}", source.rule().unwrap_or_default()),
        };
        let grammar = TopLevelGrammar::from_lark(grammar);
        let matcher = llguidance::Matcher::new(factory.create_parser(grammar));
        Ok(Arc::new(Compiled::new(matcher, self.vocab_size)?))
    }

    fn create_factory(&self) -> Result<ParserFactory, String> {
        let Some(&eos) = self.eos_token_ids.first() else {
            return Err("this model has no end-of-text token, so that constrained text could not end".into());
        };
        let words: Vec<Vec<u8>> = (0..self.vocab_size as u32).map(|id| self.word(id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab_size as u32, eos), &words);
        let trie = trie.with_eos_tokens(&self.eos_token_ids);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet().limits_mut().verbose_errors = false;
        Ok(factory)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use pegainfer_core::logits_processors::TokenMask;
    use serde_json::{Value, json};

    const EOS: [u32; 2] = [4089, 4087];

    fn compiler() -> GrammarCompiler {
        GrammarCompiler::new(Arc::new(testing::tokenizer()), 4100, EOS.to_vec())
    }

    fn allows(mask: &TokenMask, id: u32) -> bool {
        mask.words()[id as usize / 32] >> (id % 32) & 1 == 1
    }

    /// Whether the grammar allows the text, as the tokenizer spells it, and its end.
    fn accepts(source: &GrammarSource, text: &str) -> bool {
        let compiler = compiler();
        let (mut matcher, mut mask) = compiler.compile(source.clone()).unwrap().start();
        for id in compiler.tokenizer.encode(text, false).unwrap() {
            if !allows(&mask, id) {
                return false;
            }
            mask = matcher.next(id).unwrap();
        }
        assert_eq!(allows(&mask, EOS[0]), allows(&mask, EOS[1]), "every end-of-text token is one");
        allows(&mask, EOS[0])
    }

    #[test]
    fn sources_accept_their_texts_and_no_others() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
            "required": ["a"], "additionalProperties": false});
        let json = GrammarSource::JsonSchema(schema);
        let regex = GrammarSource::Regex("[ab]+/\\d{2}".into());
        let choice = GrammarSource::Choice(vec!["a \"b\"".into(), "ü\n".into()]);
        let lark = GrammarSource::Lark("start: \"one\" | \"two\" start".into());
        for (source, text, expected) in [
            (&json, "{\"a\": 1}", true),
            (&json, "{\"a\":-12,\"b\":\"é\"}", true),
            (&json, "{\n  \"a\": 1,\n  \"b\": \"x\"\n}", true),
            (&json, "{\"a\": 1", false),
            (&json, "{\"a\": \"1\"}", false),
            (&json, "{\"b\": \"x\"}", false),
            (&json, "{\"a\": 1, \"c\": 2}", false),
            (&json, "Sure: {\"a\": 1}", false),
            (&regex, "abba/42", true),
            (&regex, "abba/4", false),
            (&regex, "abba/421", false),
            (&choice, "a \"b\"", true),
            (&choice, "ü\n", true),
            (&choice, "ü", false),
            (&lark, "twotwoone", true),
            (&lark, "two", false),
        ] {
            assert_eq!(accepts(source, text), expected, "{source:?}: {text:?}");
        }
        let object = GrammarSource::JsonSchema(json!({"type": "object"}));
        assert!(accepts(&object, "{\"any\": [1, {\"thing\": null}]}") && !accepts(&object, "[1]"));
        let blank = format!("{{{}\"a\": 1}}", " ".repeat(60));
        assert!(!accepts(&json, &blank), "a model cannot write white space for ever");
    }

    #[test]
    fn control_tokens_are_not_text_and_eos_may_repeat() {
        let compiler = compiler();
        let (mut matcher, mask) = compiler.compile(GrammarSource::Regex(".*".into())).unwrap().start();
        let start = compiler.tokenizer.encode("<|im_start|>", false).unwrap();
        assert!(start.len() == 1 && !allows(&mask, start[0]), "{start:?}");
        assert!(allows(&mask, EOS[0]) && !allows(&mask, 4099), "rows without a token are never allowed");
        for _ in 0..3 {
            let mask = matcher.next(EOS[1]).unwrap();
            let count: u32 = mask.words().iter().map(|word| word.count_ones()).sum();
            assert!(count == 2 && allows(&mask, EOS[0]) && allows(&mask, EOS[1]));
        }
    }

    #[test]
    fn hostile_sources_are_errors_or_grammars_and_no_crash() {
        let (compiler, mut accepted) = (compiler(), 0);
        let nested = |open: &str, close: &str, n: usize| format!("{}\"a\"{}", open.repeat(n), close.repeat(n));
        let lark = |body: String| GrammarSource::Lark(format!("start: {body}"));
        let chain = |name: &str, more: &str, n: usize| {
            let rules: String = (0..n).map(|i| format!("{name}{i}:{name}{}{more}\n", i + 1)).collect();
            GrammarSource::Lark(format!("{rules}start:{name}0\n{name}{n}:\"a\""))
        };
        let refs = |join: &dyn Fn(usize) -> Value, n: usize| {
            let defs: serde_json::Map<String, Value> = (0..n).map(|i| (format!("{i}"), join(i + 1))).collect();
            let mut schema = json!({"$defs": defs, "$ref": "#/$defs/0"});
            schema["$defs"][n.to_string()] = json!({"type": "integer"});
            GrammarSource::JsonSchema(schema)
        };
        let to = |i: usize| json!({"$ref": format!("#/$defs/{i}")});
        let mut deep = json!({"type": "string"});
        for _ in 0..120 {
            deep = json!({"type": "array", "items": deep});
        }
        for source in [
            lark(nested("(", ")", 4_000)),
            lark("start".into()),
            lark("other\nother: start | other other".into()),
            lark("\"a\"|".repeat(500) + "\"a\""),
            lark("\"a\" ".repeat(500)),
            lark("\"a\"{1000000}".into()),
            chain("r", "", 1_500),
            chain("r", " \"b\"?", 400),
            chain("T", "", 1_500),
            chain("T", "\"b\"?", 200),
            GrammarSource::Regex(nested("(", ")", 4_000)),
            GrammarSource::Regex("(a{1000}){1000}".into()),
            GrammarSource::Regex("(a|b)*a(a|b){60}".into()),
            GrammarSource::JsonSchema(deep),
            GrammarSource::JsonSchema(json!({"$ref": "#"})),
            GrammarSource::JsonSchema(json!({"enum": (0..2_000).map(|i| format!("{i}")).collect::<Vec<_>>()})),
            GrammarSource::JsonSchema(json!({"anyOf": (0..500).map(|i| json!({"const": i})).collect::<Vec<_>>()})),
            refs(&to, 2_000),
            refs(&|i| json!({"allOf": [to(i), {"minimum": 1}]}), 500),
            refs(&|i| json!({"anyOf": [to(i), {"type": "null"}]}), 500),
            refs(&|i| json!({"type": "array", "items": to(i)}), 500),
            refs(&|i| json!({"type": "object", "properties": {"a": to(i)}}), 500),
            GrammarSource::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000})),
            GrammarSource::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000})),
        ] {
            let shown: String = format!("{source:?}").chars().take(60).collect();
            let outcome = compiler.compile(source).and_then(|grammar| {
                let (mut matcher, mask) = grammar.start();
                let id = (0..4096).find(|id| allows(&mask, *id)).unwrap();
                // Masks come from threads with a stack of the usual size.
                std::thread::spawn(move || matcher.next(id).map(drop)).join().unwrap()
            });
            assert!(outcome.as_ref().err().is_none_or(|error| !error.is_empty()), "{shown}: {outcome:?}");
            accepted += usize::from(outcome.is_ok());
        }
        assert!(accepted > 5, "{accepted} of them are large, not wrong");
    }

    #[test]
    fn sources_that_cannot_be_enforced_are_one_line_errors() {
        for (source, expected) in [
            (GrammarSource::JsonSchema(json!({"type": "rocket"})), "rocket"),
            (GrammarSource::JsonSchema(json!({"type": "object", "if": {}, "then": {}})), "Unimplemented keys"),
            (GrammarSource::JsonSchema(json!({"$ref": "#/nowhere"})), "nowhere"),
            (GrammarSource::Regex("(".into()), "("),
            (GrammarSource::Lark("begin: \"a\"".into()), "start"),
            (GrammarSource::Lark(String::new()), ""),
        ] {
            let error = compiler().compile(source.clone()).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n') && !error.is_empty(), "{source:?}: {error}");
        }
        let none = GrammarCompiler::new(Arc::new(testing::tokenizer()), 4096, vec![]);
        assert!(none.compile(GrammarSource::Regex("a".into())).unwrap_err().contains("no end-of-text token"));
    }
}

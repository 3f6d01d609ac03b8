//! Property of grammars: any source is compiled within seconds or refused with a reason. Tokens allowed by a mask lead
//! to another mask or to an error, and a text that follows a JSON schema to its end is JSON.

use pegainfer_text::{CompiledGrammar, GrammarCompiler, GrammarSource, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// `<|im_end|>` of the bundled tokenizer.
const EOS: u32 = 4089;
const VOCABULARY: usize = 4096;
/// Maximum number of tokens in a followed text.
const TOKENS: usize = 40;
/// Maximum time of one input, including waiting for a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

fn fixture() -> &'static (Arc<Tokenizer>, GrammarCompiler) {
    static FIXTURE: OnceLock<(Arc<Tokenizer>, GrammarCompiler)> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let tokenizer = Arc::new(Tokenizer::load(&dir).expect("the bundled checkpoint"));
        (tokenizer.clone(), GrammarCompiler::new(tokenizer, VOCABULARY, vec![EOS]))
    })
}

/// Checks an input: the first byte selects the kind of source, the second the tokens, the rest is the source.
pub fn check(data: &[u8]) {
    let [kind, choice, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let source = match kind % 4 {
        0 => match serde_json::from_str::<Value>(&text) {
            Ok(schema @ (Value::Object(_) | Value::Bool(_))) => GrammarSource::JsonSchema(schema),
            _ => return,
        },
        1 => GrammarSource::Regex(text.clone()),
        2 => GrammarSource::Choice(text.split('|').map(str::to_owned).collect()),
        _ => GrammarSource::Lark(text.clone()),
    };
    let began = Instant::now();
    match fixture().1.compile(source) {
        Ok(grammar) => follow(&grammar, *choice, kind % 4 == 0, &text),
        Err(error) => {
            let error = error.to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{text:?}: {error:?}");
            assert!(!error.contains("panicked"), "{text:?}: {error}");
        }
    }
    assert!(began.elapsed() < LIMIT, "{text:?} took {:?}", began.elapsed());
}

/// Follows the grammar along tokens selected by `choice`.
fn follow(grammar: &CompiledGrammar, choice: u8, is_json: bool, shown: &str) {
    let (mut matcher, mut mask) = grammar.start();
    let mut tokens = Vec::new();
    for step in 0..TOKENS {
        let allowed: Vec<u32> = (0..VOCABULARY as u32).filter(|id| mask.allows(*id)).collect();
        assert!(!allowed.is_empty(), "{shown:?}: a mask allows nothing");
        if allowed.contains(&EOS) {
            if is_json {
                let text = fixture().0.decode_all(&tokens);
                serde_json::from_str::<Value>(&text).unwrap_or_else(|e| panic!("{shown:?}: {text:?}: {e}"));
            }
            return;
        }
        let token = allowed[(choice as usize).wrapping_mul(step * 31 + 1) % allowed.len()];
        tokens.push(token);
        match matcher.next(token) {
            Ok(next) => mask = next,
            Err(error) => return assert!(!error.is_empty() && !error.contains('\n'), "{shown:?}: {error:?}"),
        }
    }
}

/// Sources of every kind, with every compiled keyword.
pub fn seeds() -> Vec<Vec<u8>> {
    let schemas = [
        json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 30}, "b": {"enum": ["x", 1]}},
            "required": ["a"], "additionalProperties": false}),
        json!({"allOf": [{"type": "string", "pattern": "^a.*"}, {"pattern": "b$"}, {"minLength": 2, "maxLength": 9}]}),
        json!({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"type": "array", "items": {"$ref": "#"},
            "maxItems": 3, "minItems": 1}}}),
        json!({"type": "object", "patternProperties": {"^k": {"type": "number", "multipleOf": 0.5}}, "minProperties": 1}),
        json!({"oneOf": [{"const": "é"}, {"type": "string", "format": "date-time"}], "title": "t"}),
        json!({"type": ["array", "boolean"], "prefixItems": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0}]}),
    ];
    let others: [(u8, &str); 7] = [
        (1, "(19|20)\\d\\d-[01]\\d"),
        (1, "[a-c]{2,5}(x|y)*\\p{L}?"),
        (2, "yes|no|perhaps \"so\""),
        (3, "start: \"a\" x{1,3} | y\nx: /[0-9]+/\ny: \"b\" start?"),
        (3, "start: A\nA: /.*a.*/ & /.*b.*/ & ~/.*c.*/"),
        (3, "start: \"v\" r\nr: %json {\"type\": \"integer\"}\n%ignore /[ ]+/"),
        (3, "start: t[suffix=\"\\n\"]\nt[lazy]: /(?s:.*)/"),
    ];
    let seed = |kind: u8, text: &str| [&[kind, kind.wrapping_mul(59).wrapping_add(7)], text.as_bytes()].concat();
    let schemas = schemas.iter().map(|schema| seed(0, &schema.to_string()));
    schemas.chain(others.iter().map(|(kind, text)| seed(*kind, text))).collect()
}

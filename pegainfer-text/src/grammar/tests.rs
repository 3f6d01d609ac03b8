//! Tests of grammar sources and the limits on their cost.

use super::*;
use crate::parser::ReasoningStart;
use pegainfer_testing as testing;
use serde_json::{Value, json};

const EOS: [u32; 2] = [4089, 4087];

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(Arc::new(Tokenizer::load(&testing::model_dir()).unwrap()), 4100, EOS.to_vec())
}

/// True if the grammar allows the tokens of the text, followed by its end.
fn accepts(source: &GrammarSource, text: &str) -> bool {
    let compiler = compiler();
    let (mut matcher, mut mask) = compiler.compile(source.clone()).unwrap().start();
    for id in compiler.tokenizer.encode(text, false).unwrap() {
        if !mask.allows(id) {
            return false;
        }
        mask = matcher.next(id).unwrap();
    }
    assert_eq!(mask.allows(EOS[0]), mask.allows(EOS[1]), "every end-of-text token is one");
    mask.allows(EOS[0])
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
    assert!(start.len() == 1 && !mask.allows(start[0]), "{start:?}");
    assert!(mask.allows(EOS[0]) && !mask.allows(4099), "rows without a token are never allowed");
    for _ in 0..3 {
        let mask = matcher.next(EOS[1]).unwrap();
        let count: u32 = mask.words().iter().map(|word| word.count_ones()).sum();
        assert!(count == 2 && mask.allows(EOS[0]) && mask.allows(EOS[1]));
    }
}

#[test]
fn clones_go_their_own_way() {
    let compiler = compiler();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}}, "required": ["a"],
        "additionalProperties": false});
    let json = Arc::new(compiler.compile(GrammarSource::JsonSchema(schema)).unwrap());
    let thinking = ReasoningLimits { start: ReasoningStart::Opened, call_ends_it: false, budget: Some(9) };
    let reasoned = compiler.after_reasoning(thinking, Some(json.clone())).unwrap();
    let budget = compiler.after_reasoning(thinking, None).unwrap();
    let (json, reasoned, budget) = (Grammar::Compiled(json), Grammar::Reasoned(reasoned), Grammar::Reasoned(budget));
    for (grammar, text) in [
        (&json, "{\"a\":-12,\"b\":\"é\"}"),
        (&json, "{\n  \"a\": 1\n}"),
        (&reasoned, "Hm.</think>\n\n{\"a\": 1}"),
        (&budget, "Hm.</think>\n\n{\"a\": 1}"),
    ] {
        let mut ids = compiler.tokenizer.encode(text, false).unwrap();
        // The text ends, and is complete.
        ids.extend([EOS[0], EOS[1]]);
        let (mut matcher, first) = grammar.start();
        let masks: Vec<AllowedTokens> =
            std::iter::once(first).chain(ids.iter().map(|id| matcher.next(*id).unwrap())).collect();
        let (mut matcher, _) = grammar.start();
        for (i, id) in ids.iter().enumerate() {
            let mut followed = matcher.clone();
            for (j, ahead) in ids.iter().enumerate().skip(i) {
                assert_eq!(followed.next(*ahead).unwrap(), masks[j + 1], "{text:?}: a clone at {i}, token {j}");
            }
            let other = (0..4100).rev().find(|other| other != id && masks[i].allows(*other));
            other.into_iter().for_each(|other| drop(matcher.clone().next(other)));
            let mut consumed = matcher.clone();
            consumed.consume(*id).unwrap();
            if let Some(behind) = ids.get(i + 1) {
                assert_eq!(consumed.next(*behind).unwrap(), masks[i + 2], "{text:?}: {i} without a mask");
            }
            assert_eq!(matcher.next(*id).unwrap(), masks[i + 1], "{text:?}: token {i}, after the clones");
        }
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
        let outcome = compiler.compile(source).map_err(|e| e.to_string()).and_then(|grammar| {
            let (mut matcher, mask) = grammar.start();
            let id = (0..4096).find(|id| mask.allows(*id)).unwrap();
            // Masks are computed on threads with the usual stack size.
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
        let error = compiler().compile(source.clone()).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n') && !error.is_empty(), "{source:?}: {error}");
    }
    let none = GrammarCompiler::new(Arc::new(Tokenizer::load(&testing::model_dir()).unwrap()), 4096, vec![]);
    let error = none.compile(GrammarSource::Regex("a".into())).unwrap_err().to_string();
    assert!(error.contains("no end-of-text token"), "{error}");
}

/// A schema of a text that has to match all patterns.
fn all_of(patterns: impl Iterator<Item = String>) -> Value {
    let members: Vec<Value> = patterns.map(|pattern| json!({"type": "string", "pattern": pattern})).collect();
    json!({"allOf": members})
}

fn letters(count: u8) -> impl Iterator<Item = String> {
    (b'a'..b'a' + count).map(|letter| format!(".*{}.*", letter as char))
}

/// Short schemas that would take llguidance hours and gigabytes.
fn bombs() -> Vec<(&'static str, Value)> {
    let property = |schema: &Value| json!({"type": "object", "properties": {"a": schema.clone()}, "required": ["a"]});
    let each = |schema: &dyn Fn(Value) -> Value| {
        let members: Vec<Value> = letters(24).map(|p| schema(json!({"type": "string", "pattern": p}))).collect();
        json!({"allOf": members})
    };
    let nested = letters(24).fold(json!({"type": "string"}), |inner, p| json!({"allOf": [inner, {"pattern": p}]}));
    let mut chain = json!({"$ref": "#/$defs/0", "$defs": {"24": {"type": "string"}}});
    for (i, pattern) in letters(24).enumerate() {
        let to = json!({"$ref": format!("#/$defs/{}", i + 1)});
        chain["$defs"][i.to_string()] = json!({"allOf": [to, {"pattern": pattern}]});
    }
    let alternatives = |i: usize| -> Vec<Value> {
        let object = |j: usize| json!({"type": "object", "properties": {format!("p{i}x{j}"): {"type": "integer"}}});
        (0..12).map(object).collect()
    };
    let groups: Vec<Value> = (0..8).map(|i| json!({"anyOf": alternatives(i)})).collect();
    let ones: Vec<Value> = (0..8).map(|i| json!({"oneOf": alternatives(i)})).collect();
    let late = (b'a'..b'a' + 24).map(|c| format!("^(q|x.*{}.*)$", c as char));
    let keys = |p: String| json!({"type": "object", "patternProperties": {"^k": {"type": "string", "pattern": p}}});
    let matched: Vec<Value> = letters(24).map(keys).collect();
    let disguised = json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}, "a~1b": all_of(letters(24))}});
    vec![
        ("patterns", all_of(letters(24))),
        ("a reference that looks escaped", disguised),
        ("patterns of a property", property(&all_of(letters(24)))),
        ("properties", each(&|schema| property(&schema))),
        ("items", each(&|schema| json!({"type": "array", "items": schema}))),
        ("additional properties", each(&|schema| json!({"type": "object", "additionalProperties": schema}))),
        ("pattern properties", json!({"allOf": matched})),
        ("nested", nested),
        ("references", chain),
        ("alternatives with siblings", json!({"anyOf": [{"type": "integer"}, all_of(letters(24))]})),
        ("any of many, many times", json!({"allOf": groups})),
        ("one of many, many times", json!({"allOf": ones})),
        ("behind the first letter", all_of(late)),
        ("two long patterns", all_of((0..2).map(|i| "(?:ab|cd)".repeat(200) + &i.to_string()))),
    ]
}

#[test]
fn sources_that_cannot_be_bounded_are_refused_before_the_work() {
    let compiler = compiler();
    let limited = |source: GrammarSource, name: &str| {
        let began = std::time::Instant::now();
        let error = compiler.compile(source).err();
        assert!(matches!(error, Some(GrammarError::Limit(_))), "{name}: {error:?}");
        assert!(began.elapsed().as_secs_f64() < 1.0, "{name}: {:?}", began.elapsed());
    };
    for (name, schema) in bombs() {
        limited(GrammarSource::JsonSchema(schema.clone()), name);
        let lark = format!("start: \"a\" r <a\"b> // \"%json 5\n# /\nr: /\"[\\/]/ %json {schema} \"%json x\" <c\"d>");
        limited(GrammarSource::Lark(lark), name);
    }
    let properties = |count: usize, required: usize| {
        let name = |i: usize| format!("p{i}");
        let all: serde_json::Map<String, Value> = (0..count).map(|i| (name(i), json!({"type": "integer"}))).collect();
        let required: Vec<String> = (0..required).map(name).collect();
        GrammarSource::JsonSchema(json!({"type": "object", "properties": all, "required": required}))
    };
    limited(properties(10_000, 10_000), "10,000 properties");
    limited(properties(1_001, 0), "1,001 optional properties");
    limited(GrammarSource::Regex("a".repeat(1 << 20)), "bytes");
}

#[test]
fn large_legal_sources_compile_within_a_second_and_can_be_followed() {
    let (compiler, text) = (compiler(), json!({"type": "string"}));
    let optional: serde_json::Map<String, Value> = (0..1_000).map(|i| (format!("p{i}"), text.clone())).collect();
    let object = json!({"type": "object", "properties": optional, "additionalProperties": false});
    compiler.compile(GrammarSource::Regex("a".into())).unwrap();
    for (name, schema, text) in [
        ("optional properties", object.clone(), "{\"p3\": \"x\", \"p500\": \"y\"}"),
        ("twice the same", json!({"allOf": [object.clone(), object]}), "{\"p999\": \"x\"}"),
        ("four patterns", all_of(["^a", "b", "c$", "^.{3,9}$"].map(String::from).into_iter()), "\"abac\""),
        ("enum", json!({"enum": (0..5_000).map(|i| format!("e{i}")).collect::<Vec<_>>()}), "\"e4999\""),
        ("recursion", json!({"type": "array", "items": {"$ref": "#"}, "maxItems": 3}), "[[], [[]]]"),
        ("reference into a list", json!({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/0"}]}), "null"),
    ] {
        let began = std::time::Instant::now();
        let compiled = compiler.compile(GrammarSource::JsonSchema(schema.clone()));
        // On an idle machine it takes a third of this.
        assert!(began.elapsed().as_secs_f64() < 3.0, "{name}: {:?}", began.elapsed());
        compiled.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(accepts(&GrammarSource::JsonSchema(schema), text), "{name}");
    }
}

/// After a dangling comma no key can follow, and the text could neither continue nor end.
#[test]
fn no_comma_is_allowed_where_no_key_can_follow() {
    let compiler = compiler();
    let goes_on = |schema: &Value, text: &str| {
        let (mut matcher, mut mask) = compiler.compile(GrammarSource::JsonSchema(schema.clone())).unwrap().start();
        for id in compiler.tokenizer.encode(text, false).unwrap() {
            assert!(mask.allows(id), "{schema}: {text}");
            mask = matcher.next(id).unwrap();
        }
        (0..4096).any(|id| mask.allows(id) && compiler.word(id).trim_ascii_start().starts_with(b","))
    };
    let (one, two) = (json!({"enum": [1, 2]}), json!({"enum": [2, 3]}));
    let object = |properties: Value, patterns: Value, more: Value| json!({"type": "object", "properties": properties, "patternProperties": patterns, "additionalProperties": more});
    let only_a = object(json!({"a": one}), json!({"^a$": two}), json!(false));
    let apart = json!({"allOf": [
        {"type": "object", "properties": {"a": one}},
        {"type": "object", "patternProperties": {"^a$": two}, "additionalProperties": false}
    ]});
    let mut required = only_a.clone();
    required["required"] = json!(["a"]);
    let none = object(json!({"a": one}), json!({"^[^a]": false, "": false}), json!(true));
    for (schema, text, expected) in [
        (&only_a, "{\"a\": 2", false),
        (&required, "{\"a\": 2", false),
        (&apart, "{\"a\": 2", false),
        (&object(json!({"a": one}), json!({"^a$": two}), json!(true)), "{\"a\": 2", true),
        (&object(json!({"a": one, "b": one}), json!({"^(a|b)$": two}), json!(false)), "{\"a\": 2", true),
        (&object(json!({"a": one, "b": one}), json!({"^(a|b)$": two}), json!(false)), "{\"a\": 2, \"b\": 2", false),
        (&object(json!({"a": one}), json!({"^[ab]$": two}), json!(false)), "{\"a\": 2", true),
        (&object(json!({"a": one}), json!({"^b": two}), json!(false)), "{\"a\": 1", true),
        (&object(json!({"a": one}), json!({"^a": two}), json!(false)), "{\"a\": 2", true),
        (&object(json!({"a": one}), json!({"^x[^\\s\\S]$": two}), json!(false)), "{\"a\": 1", false),
        (&object(json!({"a": one}), json!({"^b$": false}), json!(false)), "{\"a\": 1", false),
        (&json!({"type": "object", "patternProperties": {".*": one}}), "{\"b\": 1", true),
    ] {
        assert_eq!(goes_on(schema, text), expected, "{schema}: {text}");
    }
    // Both schemas apply to a key that both name.
    let source = GrammarSource::JsonSchema(only_a);
    let texts = ["{\"a\": 2}", "{}", "{\"a\": 1}", "{\"a\": 3}", "{\"b\": 2}"];
    assert_eq!(texts.map(|text| accepts(&source, text)), [true, true, false, false, false]);
    let error = compiler.compile(GrammarSource::JsonSchema(none)).err();
    assert!(error.is_some(), "patterns that share keys are refused");
    // In a client's own grammar, a schema is compiled unchanged.
    let lark = format!("start: %json {}", object(json!({"a": one}), json!({"^a$": two}), json!(false)));
    let error = compiler.compile(GrammarSource::Lark(lark)).err().unwrap().to_string();
    assert!(error.contains("patternProperties \"^a$\" matches keys of properties only"), "{error}");
}

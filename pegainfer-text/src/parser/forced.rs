//! The grammar of tool calls, forced or as the alternative to a structured output.

use super::format::{CALL_CLOSE, CallPrefix, FUNCTION_CLOSE, PARAMETER, PARAMETER_CLOSE, ToolFormat};
use super::raw_text::patterns;
use super::schema::{alternatives, type_name};
use crate::{GrammarSource, with_options};
use serde_json::{Value, json};

/// Keyword of a parameter's schema: a Lark grammar of the value, which can be enforced where values have no quotes.
pub const LARK: &str = "x-lark";

/// A Lark grammar for the text after `prefix`: calls of `definitions` only, at most `max_calls`. Schemas that cannot be
/// enforced completely are enforced as far as possible, unless the function is `strict`. `None` for a format whose
/// calls no grammar can describe.
///
/// # Errors
/// The part of a `strict` function's schema that cannot be enforced.
pub fn grammar(
    format: ToolFormat,
    prefix: &CallPrefix,
    definitions: &[Value],
    max_calls: usize,
) -> Result<Option<String>, String> {
    let mut rules = Rules::default();
    let calls = rules.calls(format, prefix, definitions, max_calls)?;
    Ok(calls.map(|calls| rules.text + &format!("start: {calls}\n")))
}

/// A Lark grammar of either a structured output or calls, as the model chooses; `None` if one of them cannot be part of
/// a grammar.
///
/// # Errors
/// The part of a `strict` function's schema that cannot be enforced.
pub fn grammar_or(
    output: &GrammarSource,
    format: ToolFormat,
    definitions: &[Value],
    max_calls: usize,
) -> Result<Option<String>, String> {
    let mut rules = Rules::default();
    let Some(output) = output.rule().map(|rule| rules.add(rule)) else { return Ok(None) };
    let any = CallPrefix::AnyFunction;
    let calls = rules.calls(format, &any, definitions, max_calls)?;
    Ok(calls.map(|calls| rules.text + &format!("start: {output} | {} {calls}\n", literal(&any.text(format)))))
}

#[derive(Default)]
struct Rules {
    text: String,
    count: usize,
}

impl Rules {
    /// Adds a rule and returns its name.
    fn add(&mut self, body: String) -> String {
        self.named("", body)
    }

    fn named(&mut self, attributes: &str, body: String) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        self.text += &format!("{name}{attributes}: {body}\n");
        name
    }

    /// Adds the rules of the calls that may follow `prefix`.
    fn calls(
        &mut self,
        format: ToolFormat,
        prefix: &CallPrefix,
        definitions: &[Value],
        max_calls: usize,
    ) -> Result<Option<String>, String> {
        let named = |tool: &&Value| match prefix {
            CallPrefix::Function(name) => tool["function"]["name"] == **name,
            CallPrefix::AnyFunction | CallPrefix::None => true,
        };
        let tools = definitions.iter().filter(named);
        let calls: Vec<Option<String>> =
            tools.map(|tool| self.call(format, prefix, &tool["function"])).collect::<Result<_, _>>()?;
        let Some(calls) = calls.into_iter().collect::<Option<Vec<_>>>() else { return Ok(None) };
        let call = self.add(calls.join(" | "));
        let next = literal(&format!("\n{}", CallPrefix::AnyFunction.text(format)));
        Ok(Some(if max_calls > 1 { format!("{call} ({next} {call})*") } else { call }))
    }

    fn call(&mut self, format: ToolFormat, prefix: &CallPrefix, function: &Value) -> Result<Option<String>, String> {
        let name = function["name"].as_str().unwrap_or_default();
        let named = matches!(prefix, CallPrefix::Function(_));
        let schema = arguments(function);
        let lenient = function["strict"] != true;
        Ok(Some(match format {
            // Its tags are single tokens, which a grammar over text cannot name.
            ToolFormat::Dsml => return Ok(None),
            ToolFormat::Hermes => {
                let arguments = self.json(schema, lenient);
                let before = if named {
                    format!("{}?", literal(" "))
                } else {
                    literal(&format!("{{\"name\": {}, \"arguments\": ", Value::from(name)))
                };
                self.add(format!("{before} {arguments} {}", literal(&format!("}}\n{CALL_CLOSE}"))))
            }
            ToolFormat::Qwen3Coder => {
                let mut body = if named { String::new() } else { literal(&format!("{name}>\n")) };
                let required = schema["required"].as_array().cloned().unwrap_or_default();
                for (key, value) in schema["properties"].as_object().into_iter().flatten() {
                    let parameter = self.parameter(&schema, key, value, lenient)?;
                    let optional = if required.contains(&Value::from(key.as_str())) { "" } else { "?" };
                    body += &format!(" {parameter}{optional}");
                }
                self.add(format!("{body} {}", literal(&format!("{FUNCTION_CLOSE}\n{CALL_CLOSE}"))))
            }
        }))
    }

    /// `<parameter=KEY>`, a value without quotes if it is text, `</parameter>`.
    fn parameter(&mut self, schema: &Value, key: &str, value: &Value, lenient: bool) -> Result<String, String> {
        let (open, close) = (literal(&format!("{PARAMETER}{key}>\n")), format!("\n{PARAMETER_CLOSE}\n"));
        let not_enforced = |name: &str| format!("{name} of the parameter {key:?} cannot be enforced");
        let alternatives = match alternatives(schema, value) {
            Some(alternatives) => alternatives,
            None if lenient => vec![Value::Null],
            None => return Err(not_enforced("$ref")),
        };
        let values = alternatives.iter().map(|value| self.value(schema, value, &close, lenient));
        let values: Vec<String> = values.collect::<Result<_, _>>().map_err(|name| not_enforced(&name))?;
        Ok(self.add(format!("{open} ({})", values.join(" | "))))
    }

    /// One alternative of a value, and the tag that ends it. The error is the keyword that cannot be enforced.
    fn value(&mut self, root: &Value, schema: &Value, close: &str, lenient: bool) -> Result<String, String> {
        let raw = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let constant = schema.get("const").map(std::slice::from_ref);
        let list = schema.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        if let Some(values) = constant.or(list).filter(|values| !values.is_empty()) {
            let texts: Vec<String> = values.iter().map(|value| literal(&raw(value))).collect();
            return Ok(format!("({}) {}", texts.join(" | "), literal(close)));
        }
        if let Some(grammar) = schema[LARK].as_str() {
            return Ok(format!("%lark {{\n{grammar}\n}} {}", literal(close)));
        }
        if !matches!(type_name(schema), None | Some("string")) {
            let mut schema = schema.clone();
            for name in ["$defs", "definitions"] {
                if let (Some(schema), Some(shared)) = (schema.as_object_mut(), root.get(name)) {
                    schema.insert(name.into(), shared.clone());
                }
            }
            return Ok(format!("{} {}", self.json(schema, lenient), literal(close)));
        }
        let mut terms: Vec<String> = patterns(schema, lenient)?.iter().map(|pattern| format!("/{pattern}/")).collect();
        if terms.is_empty() {
            terms.push("/(?s:.*)/".into());
        }
        Ok(self.named(&format!("[suffix={}]", literal(close)), terms.join(" & ")))
    }

    fn json(&mut self, schema: Value, lenient: bool) -> String {
        self.add(format!("%json {}", with_options(schema, lenient)))
    }
}

/// A function's parameters as an object schema. A function without parameters takes an empty object.
fn arguments(function: &Value) -> Value {
    let Some(parameters) = function["parameters"].as_object() else {
        return json!({"type": "object", "properties": {}, "additionalProperties": false});
    };
    let mut schema = parameters.clone();
    schema.entry("type").or_insert(json!("object"));
    Value::Object(schema)
}

/// A quoted string of a grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parser::{Event, OutputParser, ParserOptions, ReasoningStart};
    use crate::{GrammarCompiler, Tokenizer};
    use pegainfer_testing as testing;
    use std::sync::Arc;

    fn tools() -> Vec<Value> {
        let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
        let weather = json!({"type": "object", "required": ["city", "days"], "$defs": {"d": {"type": "integer"}}, "properties": {
            "city": {"type": "string"}, "days": {"$ref": "#/$defs/d", "type": "integer"}, "unit": {"enum": ["C", "F"]}}});
        vec![function("weather", weather), function("time", Value::Null)]
    }

    /// True if the grammar allows these calls, followed by the end of the text.
    fn accepts(format: ToolFormat, prefix: &CallPrefix, max_calls: usize, text: &str) -> bool {
        matches(grammar(format, prefix, &tools(), max_calls).unwrap().unwrap(), text)
    }

    fn matches(source: String, text: &str) -> bool {
        let tokenizer = Arc::new(Tokenizer::load(&testing::model_dir()).unwrap());
        let compiler = GrammarCompiler::new(tokenizer.clone(), 4096, vec![4089]);
        let grammar = compiler.compile(GrammarSource::Lark(source.clone())).unwrap_or_else(|e| panic!("{e}: {source}"));
        let (mut matcher, mut mask) = grammar.start();
        let allows = |words: &[u32], id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
        for id in tokenizer.encode(text, false).unwrap() {
            if !allows(mask.words(), id) {
                return false;
            }
            mask = matcher.next(id).unwrap();
        }
        allows(mask.words(), 4089)
    }

    /// Parses the text of a forced call into calls: (name, arguments).
    fn calls(format: ToolFormat, prefix: &CallPrefix, text: &str) -> Vec<(String, String)> {
        let mut parser = OutputParser::new(ParserOptions {
            reasoning: ReasoningStart::Never,
            include_reasoning: true,
            tools: Some(format),
            prefix: prefix.clone(),
            definitions: tools().into(),
            max_calls: usize::MAX,
            id_seed: 1,
        });
        let mut calls = Vec::new();
        for event in parser.push(text).into_iter().chain(parser.finish()) {
            match event {
                Event::ToolStart { name, .. } => calls.push((name, String::new())),
                Event::ToolArguments { delta, .. } => calls.last_mut().unwrap().1 += &delta,
                Event::ToolEnd { .. } => {}
                Event::Content(text) | Event::Reasoning(text) => panic!("{text:?} is not a call"),
            }
        }
        calls
    }

    #[test]
    fn the_parser_reads_what_the_grammar_accepts() {
        let (any, named) = (CallPrefix::AnyFunction, CallPrefix::Function("weather".into()));
        let weather = |arguments: &str| ("weather".to_string(), arguments.to_string());
        let two = "{\"name\": \"time\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
        let time = || ("time".to_string(), "{}".to_string());
        let coder = "<parameter=city>\nBern\nOst </p>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
        for (format, prefix, max_calls, text, expected) in [
            (
                ToolFormat::Hermes,
                &named,
                1,
                " {\"city\": \"Bern\", \"days\": 2}}\n</tool_call>",
                vec![weather("{\"city\": \"Bern\", \"days\": 2}")],
            ),
            (ToolFormat::Hermes, &any, 9, two, vec![time(), time()]),
            (ToolFormat::Qwen3Coder, &named, 1, coder, vec![weather("{\"city\": \"Bern\\nOst </p>\", \"days\": 3}")]),
            (ToolFormat::Qwen3Coder, &any, 9, "time>\n</function>\n</tool_call>", vec![time()]),
        ] {
            assert!(accepts(format, prefix, max_calls, text), "{format:?} {text}");
            assert_eq!(calls(format, prefix, text), expected);
        }
    }

    #[test]
    fn a_structured_output_may_be_the_alternative() {
        let schema = GrammarSource::JsonSchema(
            json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}),
        );
        let time = "<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
        let source = |output: &GrammarSource| grammar_or(output, ToolFormat::Hermes, &tools(), 1).unwrap();
        let cases =
            [("{\"a\": 5}", true), (time, true), ("{\"b\": 5}", false), ("{\"name\": \"time\"", false), ("5", false)];
        for (text, expected) in cases {
            assert_eq!(matches(source(&schema).unwrap(), text), expected, "{text}");
        }
        let others = [GrammarSource::Regex("a/b|c".into()), GrammarSource::Choice(vec!["a/b".into(), "x".into()])];
        for other in others {
            assert!(matches(source(&other).unwrap(), "a/b") && matches(source(&other).unwrap(), time), "{other:?}");
        }
        assert_eq!(source(&GrammarSource::Lark("start: \"a\"".into())), None);
    }

    /// True if the required parameter of a forced call, with this schema, may have this value.
    fn accepts_value(schema: &Value, text: &str) -> bool {
        let parameters = json!({"type": "object", "required": ["v"], "properties": {"v": schema},
            "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}}});
        let tools = [json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}})];
        let named = CallPrefix::Function("f".into());
        let source = grammar(ToolFormat::Qwen3Coder, &named, &tools, 1).unwrap().unwrap();
        matches(source, &format!("<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"))
    }

    #[test]
    fn values_without_quotes_are_held_to_their_schema() {
        for (schema, good, bad) in [
            (json!({"const": "echo hello"}), vec!["echo hello"], vec!["echo", "\"echo hello\""]),
            (json!({"type": "string", "pattern": "^ab+$"}), vec!["ab", "abbb"], vec!["a", "xab", "abc"]),
            (json!({"type": "string", "pattern": "b/"}), vec!["ab/c", "b/\nx"], vec!["ab"]),
            (json!({"type": "string", "minLength": 3, "maxLength": 4}), vec!["abc", "é\nüx"], vec!["ab", "abcde"]),
            (json!({"type": "string", "format": "date"}), vec!["2026-11-22"], vec!["22.11.2026"]),
            (json!({"enum": [1, 2]}), vec!["1", "2"], vec!["3", "\"1\""]),
            (json!({"enum": ["a", null]}), vec!["a", "null"], vec!["b"]),
            (json!({"$ref": "#/$defs/unit"}), vec!["C"], vec!["K"]),
            (json!({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}), vec!["F", "null"], vec!["K", "None"]),
            (json!({"type": ["integer", "null"]}), vec!["5", "null"], vec!["five"]),
            (json!({"type": "string"}), vec!["", "a\n</p>\nb"], vec![]),
            (json!({"type": "string", "x-lark": "start: \"{\" x \"}\"\nx: /[a-c]+/"}), vec!["{ab}"], vec!["{d}", "ab"]),
        ] {
            for text in good {
                assert!(accepts_value(&schema, text), "{schema} allows {text:?}");
            }
            for text in bad {
                assert!(!accepts_value(&schema, text), "{schema} forbids {text:?}");
            }
        }
    }

    #[test]
    fn only_a_strict_function_refuses_what_cannot_be_enforced() {
        for schema in [json!({"type": "string", "pattern": "(?=a)b"}), json!({"$ref": "#/$defs/missing"})] {
            let named = CallPrefix::Function("f".into());
            let forced = |strict: bool| {
                let function = json!({"name": "f", "strict": strict, "parameters": {"properties": {"v": schema}}});
                grammar(ToolFormat::Qwen3Coder, &named, &[json!({"type": "function", "function": function})], 1)
            };
            assert!(forced(true).unwrap_err().contains("of the parameter \"v\" cannot be enforced"));
            let text = "<parameter=v>\nanything\n</parameter>\n</function>\n</tool_call>";
            assert!(matches(forced(false).unwrap().unwrap(), text));
        }
    }

    #[test]
    fn other_texts_are_not_accepted() {
        let (any, named) = (CallPrefix::AnyFunction, CallPrefix::Function("weather".into()));
        for (format, prefix, text) in [
            (ToolFormat::Hermes, &named, " {\"city\": \"Bern\"}}\n</tool_call>"),
            (ToolFormat::Hermes, &named, " {\"city\": 5, \"days\": 2}}\n</tool_call>"),
            (ToolFormat::Hermes, &named, " {\"city\": \"Bern\", \"days\": 2}}"),
            (ToolFormat::Hermes, &any, "{\"name\": \"other\", \"arguments\": {}}\n</tool_call>"),
            (ToolFormat::Hermes, &any, "I think"),
            // A function without parameters takes no arguments.
            (ToolFormat::Hermes, &any, "{\"name\": \"time\", \"arguments\": {\"a\": 19}}\n</tool_call>"),
            (ToolFormat::Qwen3Coder, &any, "time>\n<parameter=a>\n19\n</parameter>\n</function>\n</tool_call>"),
            (ToolFormat::Qwen3Coder, &named, "<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"),
            (
                ToolFormat::Qwen3Coder,
                &named,
                "<parameter=city>\nBern\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            ),
            (ToolFormat::Qwen3Coder, &any, "weather>\n</function>\n</tool_call>"),
        ] {
            assert!(!accepts(format, prefix, 9, text), "{format:?} {text}");
        }
        let two = "{\"name\": \"time\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
        assert!(!accepts(ToolFormat::Hermes, &any, 1, two), "one call at most");
    }
}

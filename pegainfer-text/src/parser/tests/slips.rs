//! Models' slips in calls, and texts that only look like calls, in every format.

use super::cases::understood;
use super::*;
use ToolFormat::{Dsml, Hermes, Qwen3Coder};

/// The tools `write` and `list_files` for all formats.
fn tools() -> Arc<[Value]> {
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let properties = json!({"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"},
        "size": {"type": "number"}, "l": {"type": "array"}, "o": {"type": "object"}});
    Arc::new([
        function("write", json!({"type": "object", "properties": properties})),
        function("list_files", json!({"type": "object", "properties": {}})),
    ])
}

/// Reads `text`, where `$` stands for `｜DSML｜`, and describes reasoning, content and calls in one line.
fn read(tools: ToolFormat, reasoning: ReasoningStart, prefix: CallPrefix, text: &str) -> String {
    let text = text.replace('$', "｜DSML｜");
    let options = || ParserOptions { reasoning, prefix: prefix.clone(), definitions: self::tools(), ..options(tools) };
    let events = parse(options(), [text.as_str()]);
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(parse(options(), characters.iter().map(String::as_str)), events, "{text:?}");
    let (reasoning, content, calls) = understood(&events, &text);
    let mut parts = vec![];
    if !reasoning.is_empty() {
        parts.push(format!("R {reasoning}"));
    }
    if !content.is_empty() {
        parts.push(format!("C {content}"));
    }
    for call in calls {
        parts.push(format!("{} {}{}", call.name, call.arguments, if call.complete { "" } else { " cut" }));
    }
    parts.join(" | ")
}

fn check(cases: &[(ToolFormat, &str, &str)]) {
    check_after(ReasoningStart::Never, cases);
}

fn check_after(reasoning: ReasoningStart, cases: &[(ToolFormat, &str, &str)]) {
    for (format, text, expected) in cases {
        assert_eq!(read(*format, reasoning, CallPrefix::None, text), *expected, "{format:?} {text:?}");
    }
}

const F: &str = "<tool_call>\n<function=write>\n";
const END: &str = "\n</parameter>\n</function>\n</tool_call>";

#[test]
fn text_inside_a_call_is_kept_out_of_it() {
    check(&[
        (Qwen3Coder, &format!("{F}a\n<parameter=path>\nx{END}\nb"), "C a\nb | write {\"path\":\"x\"}"),
        (
            Qwen3Coder,
            &format!("{F}<parameter=path>\nx\n</parameter>\n</parameter>\n</function>"),
            "write {\"path\":\"x\"}",
        ),
        (Qwen3Coder, &format!("{F}<b>\n<parameter=path>\nx{END}"), "C <b> | write {\"path\":\"x\"}"),
        (
            Qwen3Coder,
            &format!("{F}<parameter=path>\nx\n</parameter>\nSo I wrote it."),
            "C So I wrote it. | write {\"path\":\"x\"} cut",
        ),
        (
            Dsml,
            "<$tool_calls>\n<$invoke name=\"write\">\na\n<$parameter name=\"path\" string=\"true\">x</$parameter>\n</$parameter>\nb\n\
             </$invoke>\nc</$tool_calls>",
            "C a\nb\nc</｜DSML｜tool_calls> | write {\"path\":\"x\"}",
        ),
    ]);
}

#[test]
fn calls_without_their_outer_tag_are_found() {
    let call = "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>";
    check(&[
        (Qwen3Coder, &format!("a\n  {call}\nb"), "C ab | write {\"path\":\"x\"}"),
        (Hermes, &format!("a\n{call}"), "C a | write {\"path\":\"x\"}"),
        (Qwen3Coder, &format!("a {call}"), &format!("C a {call}")),
        (Qwen3Coder, "<function=write> opens a call.", "C <function=write> opens a call."),
        (Qwen3Coder, "<function=other>\n</function>", "C <function=other>\n</function>"),
        (Qwen3Coder, "<function=write>\n", "write {} cut"),
        (Qwen3Coder, "<function=wri", "C <function=wri"),
        (Qwen3Coder, "<function=write>\n<parameter=path>\nab", "write {\"path\":\"ab\"} cut"),
        (Qwen3Coder, "<function=write>\n{\"path\": \"x\"}\n</function>\n</tool_call>", "write {\"path\":\"x\"}"),
        (Qwen3Coder, "{\"name\": \"write\", \"arguments\": {\"n\": 1}}\n</tool_call>\nz", "C z | write {\"n\":1}"),
        (Hermes, "a\n{\"name\": \"write\", \"arguments\": {\"n\": 1}}\n</tool_call>", "C a | write {\"n\":1}"),
        (
            Hermes,
            "{\"name\": \"write\", \"arguments\": {\"n\": 1}}",
            "C {\"name\": \"write\", \"arguments\": {\"n\": 1}}",
        ),
        (Hermes, "{\"name\": \"write\"} is it", "C {\"name\": \"write\"} is it"),
        (Hermes, "{\"name\": \"write\", \"n", "C {\"name\": \"write\", \"n"),
        (Hermes, "{\"name\": \"x\"}\n</tool_call>", "C {\"name\": \"x\"}\n</tool_call>"),
        (Dsml, "a\n<$invoke name=\"list_files\">\n</$invoke>\n</$x_y>\nb", "C ab | list_files {}"),
        (Dsml, "a\n<$invoke name=\"other\">\n</$invoke>", "C a\n<｜DSML｜invoke name=\"other\">\n</｜DSML｜invoke>"),
        (Dsml, "<$toolcalls>\n<$invoke name=\"list_files\">\n</$invoke>\n</$toolcalls>", "list_files {}"),
        (Dsml, "<$toolcalls> is a tag", "C <｜DSML｜toolcalls> is a tag"),
        (Dsml, "<$invoke name=\"write\">\n<$parameter name=\"n\" string=\"false\">1", "write {} cut"),
    ]);
}

#[test]
fn missing_closing_tags_end_where_the_next_tag_begins() {
    let p = "<$tool_calls>\n<$invoke name=\"write\">\n<$parameter name=\"path\" string=\"true\">";
    check(&[
        (
            Qwen3Coder,
            &format!("{F}<parameter=n>\n1\n</parameter>\n<function=list_files>\n</function>"),
            "write {\"n\":1} | list_files {}",
        ),
        (
            Qwen3Coder,
            &format!("{F}<parameter=n>\n1\n</parameter>\n<tool_call>\n<function=list_files>"),
            "write {\"n\":1} | list_files {} cut",
        ),
        (Qwen3Coder, &format!("{F}<parameter=path>\nx</function></tool_call>"), "write {\"path\":\"x\"}"),
        (
            Qwen3Coder,
            &format!("{F}<parameter=path>\nx\n</function>\n<tool_call>\n<function=list_files>\n</function>"),
            "write {\"path\":\"x\"} | list_files {}",
        ),
        (Qwen3Coder, &format!("{F}<parameter=n>\n1\n<parameter=new>\n2{END}"), "write {\"n\":1,\"new\":\"2\"}"),
        (
            Qwen3Coder,
            &format!("{F}<parameter=path>x</parameter><parameter=n>5</parameter></function></tool_call>"),
            "write {\"path\":\"x\",\"n\":5}",
        ),
        (Dsml, &format!("{p}x\n</$invoke>\n</$tool_calls>"), "write {\"path\":\"x\"}"),
        (Dsml, &format!("{p}x\n</$tool_calls>"), "write {\"path\":\"x\"}"),
        (
            Dsml,
            &format!("{p}x</$parameter>\n<$invoke name=\"list_files\">\n</$tool_calls>"),
            "write {\"path\":\"x\"} | list_files {}",
        ),
        (Dsml, &format!("{p}x\n<$invoke name=\"list_files\">\n</$invoke>"), "write {\"path\":\"x\"} | list_files {}"),
        (Dsml, &format!("{p}x<$parameter name=\"n\">5</$parameter></$invoke>"), "write {\"path\":\"x\",\"n\":5}"),
        (
            Hermes,
            "<tool_call>{\"name\": \"write\", \"arguments\": {\"o\": {\"a\": [1\n</tool_call>",
            "write {\"o\":{\"a\":[1]}}",
        ),
        (Hermes, "<tool_call>{\"name\": \"list_files\"\n</tool_call>", "list_files {}"),
    ]);
}

#[test]
fn values_may_contain_the_tags_of_the_format() {
    let value = "<parameter=x>\n1\n</parameter>\n<tool>\n</function>\nend </parameter> or </tool_call> .";
    let nested = "<$parameter name=\"x\" string=\"true\">1</$parameter>\n<$tool_calls> </$parameter> end";
    check(&[
        (Qwen3Coder, &format!("{F}<parameter=content>\n{value}{END}"), &format!("write {}", json!({"content": value}))),
        (
            Dsml,
            &format!(
                "<$tool_calls>\n<$invoke name=\"write\">\n<$parameter name=\"content\" string=\"true\">{nested}</$parameter>\n</$invoke>"
            ),
            &format!("write {}", json!({"content": nested.replace('$', "｜DSML｜")})),
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"write\", \"arguments\": {\"content\": \"</tool_call><tool_call>\\n</tool_call>\"}}</tool_call>",
            "write {\"content\":\"</tool_call><tool_call>\\n</tool_call>\"}",
        ),
    ]);
}

#[test]
fn json_is_repaired() {
    for (written, expected) in [
        ("{\"a\": \"x\u{1}\ty\"}", r#"{"a":"x\u0001\ty"}"#),
        ("{\"a\": \"say \"hi\" to\"}", r#"{"a":"say \"hi\" to"}"#),
        (r#"{"a": "\d\u12\"}"#, r#"{"a":"\\d\\u12\"}}"}"#),
        (r#"{"a": "\ud83d\ude00 \ud83d x \ude00"}"#, r#"{"a":"😀 � x �"}"#),
        ("{'a': True, 'b': None, 'c': ('it\\'s', \"x\")}", r#"{"a":true,"b":null,"c":["it's","x"]}"#),
        ("{\"a\": 1, \"b\": [1, 2,], }", r#"{"a":1,"b":[1,2]}"#),
        ("{\"a\": 1 \"b\": 2, \"c\", \"d\": , \"e\": 3}", r#"{"a":1,"b":2,"e":3}"#),
        ("{\"a\": 1, \"\\u0061\": 2, \"o\": {\"b\": 1, \"b\": [{}]}}", r#"{"a":1,"o":{"b":1}}"#),
        ("{\"a\": {\"x\": 1}, \"a\": {\"y\": [2]}, \"b\": 3}", r#"{"a":{"x":1},"b":3}"#),
        (
            "{\"a\": 1e400, \"b\": -1e400, \"c\": 1e308, \"d\": NaN}",
            r#"{"a":"1e400","b":"-1e400","c":1e+308,"d":"NaN"}"#,
        ),
        ("{a: b c, d: 1}", r#"{"a":"b c","d":1}"#),
        ("{\"a\": [1, {\"b\": 2}}", r#"{"a":[1,{"b":2}]}"#),
        ("{\"a\": 1], \"b\": 2}", r#"{"a":1,"b":2}"#),
    ] {
        let text = format!("<tool_call>\n{{\"name\": \"write\", \"arguments\": {written}}}\n</tool_call>");
        check(&[(Hermes, &text, &format!("write {expected}"))]);
    }
    let deep = format!("<tool_call>{{\"name\": \"write\", \"arguments\": {{\"a\": {}1", "[".repeat(1000));
    assert!(read(Hermes, ReasoningStart::Never, CallPrefix::None, &deep).ends_with("cut"));
}

#[test]
fn valid_json_passes_unchanged() {
    let arguments = "{ \"a\" : 1.50e3 , \"b\":\"\\u00e9\\/\" ,\n\t\"c\":[ ] , \"d\" : { }\r\n}";
    let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}}}</tool_call>");
    let events = describe(&parse(options(Hermes), [text.as_str()]));
    let written = "{ \"a\" : 1.50e3, \"b\":\"\\u00e9\\/\",\n\t\"c\":[ ], \"d\" : { }\r\n}";
    assert_eq!(events, ["T0 f".to_owned(), format!("A0 {written}"), "E0 true".into()]);
}

#[test]
fn an_output_that_ends_in_a_call_gives_what_is_whole() {
    let hermes = |rest: &str| format!("<tool_call>\n{{\"name\": \"write\"{rest}");
    let d = "<$tool_calls>\n<$invoke name=\"write\">\n<$parameter name=\"path\" string=\"true\">x";
    check(&[
        (Hermes, &hermes(", \"arguments\": {\"a\": tr"), "write {} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": 1"), "write {} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": 1 "), "write {} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": 1, \"b"), "write {\"a\":1} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": 1, \"b\":"), "write {\"a\":1} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": \"x\\"), "write {\"a\":\"x\"} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": \"x\\u00"), "write {\"a\":\"x\"} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": \"x\\ud83d\\ude"), "write {\"a\":\"x�\"} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": [{\"b\": \"x"), "write {\"a\":[{\"b\":\"x\"}]} cut"),
        (Hermes, &hermes(", \"arguments\": {\"a\": 1}"), "write {\"a\":1}"),
        (Hermes, &hermes(", \"argum"), "write {} cut"),
        (Qwen3Coder, &format!("{F}<parameter=l>\n[1, 2"), "write {} cut"),
        (Qwen3Coder, &format!("{F}<parameter=path>\nx\n</para"), "write {\"path\":\"x\"} cut"),
        (Qwen3Coder, &format!("{F}<parameter=path>\nx</parameter>"), "write {\"path\":\"x\"} cut"),
        (Qwen3Coder, &format!("{F}<parameter=path>\nx\n</parameter>\n<param"), "write {\"path\":\"x\"} cut"),
        (Qwen3Coder, &format!("{F}<parameter=path>\nx\n</parameter>\n</function"), "write {\"path\":\"x\"} cut"),
        (Dsml, &format!("{d}</$para"), "write {\"path\":\"x\"} cut"),
        (Dsml, &format!("{d}</$parameter>"), "write {\"path\":\"x\"} cut"),
        (Dsml, &format!("{d}</$parameter>\n</$inv"), "write {\"path\":\"x\"} cut"),
        (Dsml, &format!("{d}</$parameter>\n</$invoke>\n</$too"), "write {\"path\":\"x\"}"),
    ]);
}

#[test]
fn calls_before_the_end_of_the_reasoning() {
    let json = "<tool_call>\n{\"name\": \"list_files\", \"arguments\": {}}\n</tool_call>";
    let tags = "<tool_call>\n<function=list_files>\n</function>\n</tool_call>";
    let bare = "<function=list_files>\n</function>";
    let dsml = "<$tool_calls>\n<$invoke name=\"list_files\">\n</$invoke>\n</$tool_calls>";
    for (format, call) in
        [(Hermes, json), (Hermes, tags), (Qwen3Coder, tags), (Qwen3Coder, bare), (Qwen3Coder, json), (Dsml, dsml)]
    {
        let shown = call.replace('$', "｜DSML｜");
        check_after(
            ReasoningStart::Opened,
            &[
                (format, &format!("a\n{call}"), "R a | list_files {}"),
                (format, &format!("a\n{call}\n{call}\n"), "R a | list_files {} | list_files {}"),
                (format, &format!("a\n{call}\n</think>\n\n"), "R a | list_files {}"),
                (format, &format!("a\n{call}\n</thi"), "R a | list_files {}"),
                (format, &format!("a\n{call}\nb"), &format!("R a\n{shown}\nb")),
                (format, &format!("a\n{call}\nb\n</think>\n\nc"), &format!("R a\n{shown}\nb | C c")),
                (format, &format!("a\n{call}\n</think>\n\nc"), &format!("R a\n{shown} | C c")),
                (format, &format!("a\n{call}\nb\n{call}"), &format!("R a\n{shown}\nb | list_files {{}}")),
                (format, &format!("a\n{call}\n</think>\n\n{call}"), &format!("R a\n{shown} | list_files {{}}")),
                (
                    format,
                    &format!("a\n{}</think>c", &call[..30]),
                    &format!("R a\n{} | C c", call[..30].replace('$', "｜DSML｜").trim_end()),
                ),
            ],
        );
    }
}

#[test]
fn a_forced_call_that_is_cut_off_gives_no_content() {
    let read = |format, prefix: &CallPrefix, text: &str| read(format, ReasoningStart::Never, prefix.clone(), text);
    let (any, named) = (CallPrefix::AnyFunction, CallPrefix::Function("write".into()));
    assert_eq!(read(Hermes, &any, "{\"name"), "");
    assert_eq!(read(Hermes, &any, "{\"name\": \"wri"), "");
    assert_eq!(read(Hermes, &any, "{\"name\": \"write\", \"arg"), "write {} cut");
    assert_eq!(read(Hermes, &named, " {"), "write {} cut");
    assert_eq!(read(Hermes, &named, " "), "write {} cut");
    assert_eq!(read(Qwen3Coder, &any, "wri"), "");
    assert_eq!(read(Qwen3Coder, &named, "<para"), "write {} cut");
    assert_eq!(read(Dsml, &any, "wri"), "");
    assert_eq!(read(Dsml, &named, "<$para"), "write {} cut");
}

#[test]
fn a_dropped_call_leaves_no_events() {
    let call = "<tool_call>\n<function=list_files>\noops\n</function>\n</tool_call>\n";
    let text = call.repeat(3);
    let options = ParserOptions { max_calls: 1, definitions: tools(), ..options(Qwen3Coder) };
    assert_eq!(describe(&parse(options, [text.as_str()])), ["T0 list_files", "A0 {}", "E0 true", "C oops"]);
}

#[test]
fn long_strings_are_streamed() {
    for (format, start) in [
        (Hermes, "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \"".to_owned()),
        (Qwen3Coder, format!("{F}<parameter=path>\n")),
        (Qwen3Coder, "<function=write>\n<parameter=path>\n".into()),
        (Qwen3Coder, "<function=write>\n{\"path\": \"".into()),
        (Dsml, "<｜DSML｜invoke name=\"write\">\n<｜DSML｜parameter name=\"path\" string=\"true\">".into()),
    ] {
        let mut parser = OutputParser::new(ParserOptions {
            reasoning: ReasoningStart::Never,
            definitions: tools(),
            ..options(format)
        });
        parser.push(&start);
        for word in ["some", " words", "\n<tag>", " of a", " value"] {
            assert!(!parser.push(word).is_empty(), "{word} after {start}");
        }
    }
}

//! Tests of DeepSeek-V4's calls.

use super::*;

fn options_after(reasoning: ReasoningStart, prefix: CallPrefix) -> ParserOptions {
    ParserOptions { reasoning, prefix, ..options(ToolFormat::Dsml) }
}

const CALL: &str = "hm\n</think>I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
    <｜DSML｜parameter name=\"k\" string=\"true\">a \"b\" </x> é</｜DSML｜parameter>\n\
    <｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"x\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
    <｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

fn expected() -> Vec<String> {
    let arguments = "A0 {\"k\": \"a \\\"b\\\" </x> é\", \"n\": [1,{\"x\":null}]}";
    ["R hm", "C I look.", "T0 f", arguments, "E0 true", "T1 g", "A1 {}", "E1 true"].map(str::to_owned).to_vec()
}

#[test]
fn every_cut_gives_the_same_events() {
    let options =
        || ParserOptions { definitions: Arc::new([]), ..options_after(ReasoningStart::Opened, CallPrefix::None) };
    let whole = describe(&parse(options(), [CALL]));
    assert_eq!(whole, expected());
    for (cut, _) in CALL.char_indices() {
        let (a, b) = CALL.split_at(cut);
        assert_eq!(describe(&parse(options(), [a, b])), whole, "cut at {cut}");
    }
    let characters: Vec<String> = CALL.chars().map(String::from).collect();
    let singly = parse(options(), characters.iter().map(String::as_str));
    assert_eq!(describe(&singly), whole);
}

#[test]
fn text_that_is_no_call_becomes_content_and_cut_off_calls_are_emitted() {
    let read = |prefix, text: &str| describe(&parse(options_after(ReasoningStart::Never, prefix), [text]));
    let none = || CallPrefix::None;
    assert_eq!(read(none(), "a <｜DSML｜tool_calls> b"), ["C a <｜DSML｜tool_calls> b"]);
    assert_eq!(read(none(), "a <｜DSML｜tool"), ["C a <｜DSML｜tool"]);
    let open = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n";
    let cut = format!("{open}<｜DSML｜parameter name=\"k\" string=\"true\">ab");
    assert_eq!(read(none(), &cut), ["T0 f", "A0 {\"k\": \"ab\"}", "E0 false"]);
    let wrong = format!(
        "{open}<｜DSML｜parameter name=\"k\" string=\"false\">yes</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
    );
    assert_eq!(read(none(), &wrong), ["T0 f", "A0 {\"k\": \"yes\"}", "E0 true"]);
    let stray = format!("{open}oops</｜DSML｜invoke></｜DSML｜tool_calls> z");
    assert_eq!(read(none(), &stray), ["T0 f", "A0 {}", "E0 true", "C oops\nz"]);
    assert_eq!(
        read(CallPrefix::AnyFunction, "g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
        ["T0 g", "A0 {}", "E0 true"]
    );
    assert_eq!(read(CallPrefix::Function("h".into()), "</｜DSML｜invoke>"), ["T0 h", "A0 {}", "E0 true"]);
}

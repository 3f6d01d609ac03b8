//! Property of the output parsers: the events do not depend on where the text is cut, and between the start and end of
//! a call there are only its arguments.

use pegainfer_text::parser::{CallPrefix, Event, OutputParser, ParserOptions, ReasoningStart, ToolFormat};
use serde_json::json;

/// Checks an input: the first byte selects the format, the second the cuts, the rest is the text.
pub fn check(data: &[u8]) {
    let [format, cuts, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let whole = parse(*format, [text.as_ref()].into_iter());
    let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
    assert_eq!(parse(*format, characters), whole, "{text:?} one by one");
    assert_eq!(parse(*format, deltas(&text, *cuts).into_iter()), whole, "{text:?} cut by {cuts}");
    let mut open = None;
    for event in &whole {
        match event {
            Event::ToolStart { index, .. } => assert_eq!(open.replace(*index), None, "{text:?}"),
            Event::ToolArguments { index, .. } => assert_eq!(open, Some(*index), "{text:?}"),
            Event::ToolEnd { index, .. } => assert_eq!(open.take(), Some(*index), "{text:?}"),
            Event::Reasoning(_) | Event::Content(_) => assert_eq!(open, None, "{text:?}"),
        }
    }
    assert_eq!(open, None, "{text:?}");
}

/// Cuts the text at every character whose position shares a bit with the pattern.
pub fn deltas(text: &str, pattern: u8) -> Vec<&str> {
    let (mut deltas, mut start) = (vec![], 0);
    for (at, _) in text.char_indices().skip(1).filter(|(at, _)| *at as u8 & pattern & 0x1f != 0) {
        deltas.push(&text[start..at]);
        start = at;
    }
    deltas.push(&text[start..]);
    deltas
}

fn parse<'a>(format: u8, deltas: impl Iterator<Item = &'a str>) -> Vec<Event> {
    let mut parser = OutputParser::new(ParserOptions {
        reasoning: [ReasoningStart::Never, ReasoningStart::IfOpened, ReasoningStart::Opened][format as usize % 3],
        include_reasoning: format & 64 == 0,
        tools: [None, Some(ToolFormat::Hermes), Some(ToolFormat::Qwen3Coder), Some(ToolFormat::Dsml)]
            [format as usize / 3 % 4],
        prefix: match format / 12 % 3 {
            0 => CallPrefix::None,
            1 => CallPrefix::AnyFunction,
            _ => CallPrefix::Function("f".into()),
        },
        definitions: std::sync::Arc::new([
            json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}}}),
        ]),
        max_calls: if format & 128 == 0 { usize::MAX } else { 1 },
        id_seed: 1,
    });
    let mut events: Vec<Event> = deltas.flat_map(|delta| parser.push(delta)).collect();
    events.extend(parser.finish());
    joined(events)
}

/// The events with neighbouring deltas of the same kind joined.
pub fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut joined: Vec<Event> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(Event::Reasoning(sum)), Event::Reasoning(more)) => *sum += &more,
            (Some(Event::Content(sum)), Event::Content(more)) => *sum += &more,
            (Some(Event::ToolArguments { index, delta }), Event::ToolArguments { index: same, delta: more })
                if *index == same =>
            {
                *delta += &more;
            }
            (_, event) => joined.push(event),
        }
    }
    joined
}

/// Outputs in all formats, with every format byte in use.
pub fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "<think>\nhm\n</think>\n\nThe answer is <b>4</b>.",
        "Let me look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 4, \"text\": \"é \\\" }\"}}\n</tool_call>\n\
         <tool_call>\n{\"arguments\": {}, \"name\": \"g\"}\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=n>\n4\n</parameter>\n<parameter=text>\n</para\n</parameter>\n</function>\n\
         </tool_call>",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"text\" string=\"true\">é</｜DSML｜parameter>\n\
         </｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "\n{\"name\": \"f\", \"arguments\": {\"n\": [1, {\"a\": null}]}}\n</tool_call> and more",
    ];
    let seed = |format: u8, text: &str| [&[format, format.wrapping_mul(37)], text.as_bytes()].concat();
    texts.iter().flat_map(|text| (0..36).map(move |format| seed(format, text))).collect()
}

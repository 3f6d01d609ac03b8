//! DeepSeek-V4's chat encoding. The model has no Jinja template: messages become a prompt here.
//!
//! The assistant's turn begins with `<think>` or, without reasoning, `</think>`. Reasoning of turns before the last user
//! message is dropped, unless there are tools. Tool calls and results are written in the model's own markup (DSML).

mod effort;
mod tools;

pub use effort::Efforts;

use super::parser::{OutputFormat, ToolFormat};
use serde_json::{Map, Value};
use tools::{calls, in_order_of_calls, tools_text};

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const REMINDER: &str = "<｜latest_reminder｜>";
const THINK: &str = "<think>";
const THINK_END: &str = "</think>";

/// Values of a user message's `task`; all but the first are generated without an assistant turn.
const TASKS: [&str; 6] = ["action", "query", "authority", "domain", "title", "read_url"];

/// Output format of the model.
pub const OUTPUT_FORMAT: OutputFormat = OutputFormat { reasoning: true, tools: Some(ToolFormat::Dsml) };

/// Options of the rendering.
struct Options<'a> {
    thinking: bool,
    /// Whether to drop the reasoning of turns before the last user message.
    drop_thinking: bool,
    /// Text for the reasoning effort, at the beginning of the prompt.
    effort: &'a str,
}

impl<'a> Options<'a> {
    /// Parses `chat_template_kwargs`: `thinking` (or `enable_thinking`), `drop_thinking` and `reasoning_effort`.
    fn parse(kwargs: &Map<String, Value>, tools: bool, efforts: &'a Efforts) -> Result<Self, String> {
        let flag = |name: &str| match kwargs.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(format!("{name} must be true or false, got {other}")),
        };
        let asked = match kwargs.get("reasoning_effort") {
            None | Some(Value::Null) => None,
            Some(Value::String(level)) => Some(level.as_str()),
            Some(other) => return Err(format!("reasoning_effort must be a string, got {other}")),
        };
        let thinking = match (flag("thinking")?.or(flag("enable_thinking")?), asked) {
            (Some(true), Some("none")) => return Err("reasoning_effort is none, but thinking is true".to_owned()),
            (Some(thinking), _) => thinking,
            (None, asked) => asked.is_some_and(|level| level != "none"),
        };
        let text = |asked| efforts.text(asked).map_err(|e| format!("reasoning_effort {e}"));
        let effort = if thinking { text(asked)? } else { "" };
        Ok(Self { thinking, drop_thinking: flag("drop_thinking")?.unwrap_or(true) && !tools, effort })
    }
}

/// Renders the prompt of `messages`, whose contents are strings. `tools` are in OpenAI's format.
pub fn render(
    efforts: &Efforts,
    messages: &[Value],
    tools: Option<&[Value]>,
    add_generation_prompt: bool,
    kwargs: &Map<String, Value>,
) -> Result<String, String> {
    let tools = tools.filter(|tools| !tools.is_empty());
    let options = Options::parse(kwargs, tools.is_some(), efforts)?;
    let last_user = messages.iter().rposition(|m| matches!(role(m), "user" | "tool")).unwrap_or(0);
    let mut prompt = BOS.to_owned() + options.effort;
    // The tool texts follow the system prompt, or replace it if there is none.
    let shown = tools.map(tools_text);
    if messages.first().map(role) != Some("system") {
        prompt.extend(shown.clone());
    }
    let mut i = 0;
    while i < messages.len() {
        let message = &messages[i];
        match role(message) {
            "system" => {
                prompt.push_str(content(message));
                prompt.extend(shown.clone().filter(|_| i == 0));
            }
            "latest_reminder" => prompt = prompt + REMINDER + content(message),
            "user" => prompt = prompt + USER + content(message),
            "tool" => {
                let end = i + messages[i..].iter().take_while(|m| role(m) == "tool").count();
                prompt = prompt + USER + &results(messages, i, end);
                i = end - 1;
                // A user message after the results is part of the same turn.
                if messages.get(end).is_some_and(|next| role(next) == "user") {
                    prompt = prompt + "\n\n" + content(&messages[end]);
                    i = end;
                }
            }
            "assistant" => prompt.push_str(&assistant(message, &options, i > last_user)),
            other => return Err(format!("the role {other:?} is unknown to this model")),
        }
        let next = messages.get(i + 1).map(role);
        let reply = next == Some("assistant") || (next.is_none() && add_generation_prompt);
        if reply && matches!(role(&messages[i]), "user" | "tool") {
            prompt.push_str(&opening(&messages[i], &options, i >= last_user)?);
        }
        i += 1;
    }
    Ok(prompt)
}

/// Opening of the assistant's turn after a user message.
fn opening(message: &Value, options: &Options<'_>, last: bool) -> Result<String, String> {
    let thinks = options.thinking && (last || !options.drop_thinking);
    let turn = ASSISTANT.to_owned() + if thinks { THINK } else { THINK_END };
    match &message["task"] {
        Value::Null => Ok(turn),
        Value::String(task) if TASKS.contains(&task.as_str()) => {
            let mark = format!("<｜{task}｜>");
            Ok(if task == "action" { turn + &mark } else { mark })
        }
        other => Err(format!("task {other} is unknown: there are {}", TASKS.join(", "))),
    }
}

/// An earlier assistant message, without its opening.
fn assistant(message: &Value, options: &Options<'_>, after_last_user: bool) -> String {
    let mut text = String::new();
    if options.thinking && (after_last_user || !options.drop_thinking) {
        text = text + message["reasoning_content"].as_str().unwrap_or_default() + THINK_END;
    }
    text + content(message) + &calls(&message["tool_calls"]) + EOS
}

/// The tool results `messages[first..end]`, in the order of their calls.
fn results(messages: &[Value], first: usize, end: usize) -> String {
    let made = messages[..first].iter().rev().find(|m| role(m) == "assistant").map(|m| &m["tool_calls"]);
    let ordered = in_order_of_calls(&messages[first..end], made);
    let blocks: Vec<String> = ordered.iter().map(|m| format!("<tool_result>{}</tool_result>", content(m))).collect();
    blocks.join("\n\n")
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;
    use serde_json::json;
    use std::path::PathBuf;

    fn prompt(messages: Value, tools: Option<Value>, kwargs: Value) -> Result<String, String> {
        let tools = tools.map(|tools| tools.as_array().unwrap().clone());
        let efforts = Efforts::load(&PathBuf::new());
        render(&efforts, messages.as_array().unwrap(), tools.as_deref(), true, kwargs.as_object().unwrap())
    }

    #[test]
    fn the_text_of_an_effort_comes_first() {
        let dir = TempDir::new("effort");
        std::fs::create_dir(dir.path().join("encoding")).unwrap();
        let source =
            "\nREASONING_EFFORT_PROMPTS = {\n\"low\": \"\",\n\"high\": \"Well! \",\n\"max\": \"Very well! \",\n}\n";
        std::fs::write(dir.path().join("encoding/encoding_dsv4.py"), source).unwrap();
        let efforts = Efforts::load(dir.path());
        let messages = [json!({"role": "system", "content": "S"}), json!({"role": "user", "content": "a"})];
        let prompt = |tools: Option<&[Value]>, kwargs: Value| {
            render(&efforts, &messages, tools, true, kwargs.as_object().unwrap()).unwrap()
        };
        let expected = |text: &str, mark: &str| format!("{BOS}{text}S{USER}a{ASSISTANT}{mark}");
        for (kwargs, text, mark) in [
            (json!({}), "", THINK_END),
            (json!({"thinking": true}), "Well! ", THINK),
            (json!({"reasoning_effort": "max"}), "Very well! ", THINK),
            (json!({"reasoning_effort": "low", "thinking": true}), "", THINK),
            (json!({"reasoning_effort": "max", "thinking": false}), "", THINK_END),
            (json!({"reasoning_effort": "none"}), "", THINK_END),
        ] {
            assert_eq!(prompt(None, kwargs.clone()), expected(text, mark), "{kwargs}");
        }
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let with_tools =
            render(&efforts, &messages[1..], Some(&tools), true, json!({"thinking": true}).as_object().unwrap());
        assert!(with_tools.unwrap().starts_with(&format!("{BOS}Well! \n\n## Tools")));
    }

    #[test]
    fn plain_turns() {
        let messages = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"}, {"role": "user", "content": "c"}]);
        let chat = prompt(messages.clone(), None, json!({})).unwrap();
        let start = format!("{BOS}S{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}");
        assert_eq!(chat, format!("{start}</think>"));
        assert_eq!(prompt(messages.clone(), None, json!({"thinking": true})).unwrap(), format!("{start}<think>"));
        let kept = prompt(messages, None, json!({"enable_thinking": true, "drop_thinking": false})).unwrap();
        assert_eq!(kept, format!("{BOS}S{USER}a{ASSISTANT}<think>hm</think>b{EOS}{USER}c{ASSISTANT}<think>"));
    }

    #[test]
    fn tools_calls_and_results() {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"b": "é"}}}]);
        let call = |id: &str, arguments: Value| json!({"id": id, "function": {"name": "f", "arguments": arguments}});
        let messages = json!([{"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                call("1", json!({"k": "x", "n": [1, 2]})), call("2", json!("{\"k\": true}"))]},
            {"role": "tool", "tool_call_id": "2", "content": "second"},
            {"role": "tool", "tool_call_id": "1", "content": "first"},
            {"role": "user", "content": "and?"}]);
        let text = prompt(messages, Some(tools), json!({"thinking": true})).unwrap();
        assert!(text.starts_with(&format!("{BOS}\n\n## Tools\n")), "{text}");
        assert!(text.contains("\n\n{\"name\": \"f\", \"parameters\": {\"b\": \"é\"}}\n\n"), "{text}");
        let turn = "<think>hm</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
            <｜DSML｜parameter name=\"k\" string=\"true\">x</｜DSML｜parameter>\n\
            <｜DSML｜parameter name=\"n\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
            <｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"k\" string=\"false\">true</｜DSML｜parameter>\n\
            </｜DSML｜invoke>\n</｜DSML｜tool_calls>";
        let end = format!(
            "{turn}{EOS}{USER}<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nand?{ASSISTANT}<think>"
        );
        assert!(text.ends_with(&end), "{text}");
    }

    #[test]
    fn quick_tasks_and_reminders() {
        let ask = |task: &str| prompt(json!([{"role": "user", "content": "a", "task": task}]), None, json!({}));
        assert_eq!(ask("title").unwrap(), format!("{BOS}{USER}a<｜title｜>"));
        assert_eq!(ask("action").unwrap(), format!("{BOS}{USER}a{ASSISTANT}</think><｜action｜>"));
        assert!(ask("dance").unwrap_err().contains("there are action, query"));
        let reminder = json!([{"role": "latest_reminder", "content": "now"}, {"role": "user", "content": "a"}]);
        assert_eq!(prompt(reminder, None, json!({})).unwrap(), format!("{BOS}{REMINDER}now{USER}a{ASSISTANT}</think>"));
    }

    #[test]
    fn unsupported_arguments_are_refused_by_name() {
        let user = json!([{"role": "user", "content": "a"}]);
        for (kwargs, name) in [
            (json!({"reasoning_effort": "max"}), "encoding/encoding_dsv4.py"),
            (json!({"reasoning_effort": 5}), "reasoning_effort must be a string"),
            (json!({"reasoning_effort": "none", "thinking": true}), "reasoning_effort is none"),
            (json!({"thinking": "yes"}), "thinking must be true or false"),
        ] {
            assert!(prompt(user.clone(), None, kwargs).unwrap_err().contains(name));
        }
    }

    /// The official pairs in the directory `PEGAINFER_TEST_DSV4_ENCODING`: test_input_N.json and test_output_N.txt.
    #[test]
    #[ignore = "needs the official pairs: PEGAINFER_TEST_DSV4_ENCODING=DIR"]
    fn official_conversations() {
        let dir = std::env::var_os("PEGAINFER_TEST_DSV4_ENCODING").expect("PEGAINFER_TEST_DSV4_ENCODING is not set");
        let dir = PathBuf::from(dir);
        for (n, thinking) in [(1, true), (2, true), (4, false)] {
            let read = |name: String| std::fs::read_to_string(dir.join(name)).unwrap();
            let input: Value = serde_json::from_str(&read(format!("test_input_{n}.json"))).unwrap();
            let messages = if input.is_array() { &input } else { &input["messages"] };
            let tools = input.get("tools").and_then(Value::as_array).map(Vec::as_slice);
            let kwargs = json!({"thinking": thinking});
            let efforts = Efforts::load(&dir);
            let text =
                render(&efforts, messages.as_array().unwrap(), tools, false, kwargs.as_object().unwrap()).unwrap();
            assert_eq!(text, read(format!("test_output_{n}.txt")), "pair {n}");
        }
    }
}

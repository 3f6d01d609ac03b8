//! The text of a scripted model.

use serde_json::Value;

/// Format of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `<tool_call>` around JSON, as Qwen3 writes it.
    Json,
    /// `<function=…>` and `<parameter=…>`, as Qwen3.5 writes it.
    Tags,
}

/// One reply: reasoning, content, then calls.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub reasoning: String,
    pub content: String,
    /// Names and arguments of the calls.
    pub calls: Vec<(String, Value)>,
}

impl Reply {
    /// The model's text after this prompt, which may have opened the reasoning or switched it off.
    pub fn text(&self, format: Format, prompt: &str) -> String {
        let prompt = prompt.trim_end();
        let open = if prompt.ends_with("<think>") { "" } else { "<think>\n" };
        let off = prompt.ends_with("</think>");
        let mut text = if off { String::new() } else { format!("{open}{}\n</think>\n\n", self.reasoning) };
        text += &self.content;
        for (name, arguments) in &self.calls {
            text += "\n<tool_call>\n";
            text += &match format {
                Format::Json => format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}"),
                Format::Tags => format!("<function={name}>\n{}</function>", parameters(arguments)),
            };
            text += "\n</tool_call>";
        }
        text
    }
}

fn parameters(arguments: &Value) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let parameter = |(key, v): (&String, &Value)| format!("<parameter={key}>\n{}\n</parameter>\n", value(v));
    arguments.as_object().unwrap().iter().map(parameter).collect()
}

//! Tools in a prompt: schemas, earlier calls, and the order of results.

use crate::tojson::dumps;
use serde_json::{Map, Value};

/// The prompt's texts before and after the tool schemas. The model was trained with these words; they are part of its
/// format like the tags.
const BEFORE: &str = r#"

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"#;
const AFTER: &str =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

/// The tool section of a prompt, with one schema per line.
pub fn tools_text(tools: &[Value]) -> String {
    let schemas: Vec<String> = tools.iter().map(|tool| dumps(&tool["function"])).collect();
    format!("{BEFORE}{}{AFTER}", schemas.join("\n"))
}

/// The tool calls of an earlier turn; empty if there are none.
pub fn calls(calls: &Value) -> String {
    let Some(calls) = calls.as_array().filter(|calls| !calls.is_empty()) else { return String::new() };
    let invokes: Vec<String> = calls.iter().map(|call| invoke(&call["function"])).collect();
    format!("\n\n<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>", invokes.join("\n"))
}

fn invoke(function: &Value) -> String {
    // The arguments are an object, or the text of one, as OpenAI sends it.
    let arguments: Map<String, Value> = match &function["arguments"] {
        Value::Object(arguments) => arguments.clone(),
        other => serde_json::from_str(other.as_str().unwrap_or_default()).unwrap_or_default(),
    };
    let parameters: String = arguments.iter().map(|(key, value)| parameter(key, value)).collect();
    format!(
        "<｜DSML｜invoke name=\"{}\">\n{parameters}</｜DSML｜invoke>",
        function["name"].as_str().unwrap_or_default()
    )
}

fn parameter(key: &str, value: &Value) -> String {
    let (is_string, text) = match value {
        Value::String(text) => (true, text.clone()),
        other => (false, dumps(other)),
    };
    format!("<｜DSML｜parameter name=\"{key}\" string=\"{is_string}\">{text}</｜DSML｜parameter>\n")
}

/// Sorts results into the order of their calls; results without a call come last, in their own order.
pub fn in_order_of_calls<'a>(results: &'a [Value], calls: Option<&Value>) -> Vec<&'a Value> {
    let made = calls.and_then(Value::as_array);
    let place = |result: &&Value| {
        let id = &result["tool_call_id"];
        made.and_then(|calls| calls.iter().position(|call| call["id"] == *id)).unwrap_or(usize::MAX)
    };
    let mut ordered: Vec<&Value> = results.iter().collect();
    ordered.sort_by_key(place);
    ordered
}

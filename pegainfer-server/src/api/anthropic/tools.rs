//! Tools of `/v1/messages` as functions.

use crate::api::schema::Body;
use crate::api::schema::anthropic::{ChoiceKind, ToolChoiceFields, ToolFields};
use crate::api::schema::values::Object;
use crate::api::tools::{Definition, ToolChoice, Tools};
use crate::error::{ApiError, truncate_for_error};

/// Prefixes of the types of tools that Anthropic's servers run. They are left out, because the model cannot call them.
const SERVER_TOOLS: [&str; 5] = ["web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset"];

/// The functions of a request.
pub struct Definitions(Vec<Definition>);

impl Definitions {
    /// Reads the tools. Those that Anthropic's servers run are left out and reported.
    pub fn read(tools: Vec<Object<ToolFields>>, body: &mut Body<'_>) -> Result<Self, ApiError> {
        let mut definitions = Vec::new();
        for (i, Object(tool)) in tools.into_iter().enumerate() {
            match tool.kind.as_deref() {
                None | Some("custom") => definitions.push(definition(i, tool)?),
                Some(kind) if SERVER_TOOLS.iter().any(|server| kind.starts_with(server)) => {
                    body.ignore(format!("tools[].{}", truncate_for_error(kind)));
                }
                Some(kind) => {
                    let message = format!(
                        "tools[{i}].type {:?} is not implemented: only custom tools, which have an input_schema, are",
                        truncate_for_error(kind)
                    );
                    return Err(ApiError::invalid("tools", message).with_code("unsupported_parameter"));
                }
            }
        }
        Ok(Self(definitions))
    }

    /// The definition of a function as text, for a tool_reference.
    pub fn shown(&self, name: &str) -> Option<String> {
        self.0.iter().find(|tool| tool.name() == name).map(|tool| tool.text())
    }

    /// The tools that the model may or must call.
    pub fn choose(self, choice: Option<Object<ToolChoiceFields>>) -> Result<Tools, ApiError> {
        let Object(ToolChoiceFields { kind, name, disable_parallel_tool_use }) = choice.unwrap_or_default();
        let choice = match (kind, name) {
            (None | Some(ChoiceKind::Auto), None) => ToolChoice::Auto,
            (Some(ChoiceKind::None), None) => ToolChoice::None,
            (Some(ChoiceKind::Any), None) => ToolChoice::Required,
            (Some(ChoiceKind::Tool), Some(name)) => ToolChoice::Function(name),
            _ => {
                let message = "tool_choice.name is needed for the type tool, and for no other";
                return Err(ApiError::invalid("tool_choice", message));
            }
        };
        Tools::new(self.0, choice, disable_parallel_tool_use != Some(true))
    }
}

fn definition(i: usize, tool: ToolFields) -> Result<Definition, ApiError> {
    let Some(schema) = tool.input_schema else {
        return Err(ApiError::invalid("tools", format!("tools[{i}].input_schema is missing")));
    };
    let named = format!("tools[{i}].name");
    let definition = Definition::new(&named, tool.name, tool.description, Some(schema), tool.strict)?;
    Ok(Definition { deferred: tool.defer_loading == Some(true), ..definition })
}

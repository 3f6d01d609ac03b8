//! Tools of `/v1/responses` as functions, and their calls back as items of this API.

use crate::api::schema::Body;
use crate::api::schema::conversation::{Parameters, ToolMode};
use crate::api::schema::responses::{
    AllowedToolFields, InputFormatFields, NamedChoiceFields, NamespacedToolFields, TOOL_CHOICES, ToolChoiceField,
    ToolFields,
};
use crate::api::schema::values::Object;
use crate::api::tools::{Definition, ToolChoice, Tools};
use crate::error::{ApiError, truncate_for_error};
use pegainfer_text::parser::LARK;
use serde_json::{Map, Value, json};

/// Name of the function that stands for a search for tools.
pub const TOOL_SEARCH: &str = "tool_search";

/// Kind of a function in this API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A function.
    Function,
    /// A tool with a text as input.
    Custom,
    /// A search for tools by the client.
    ToolSearch,
}

/// A tool of this API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalledTool {
    /// Kind of the tool.
    pub kind: Kind,
    /// Namespace of the tool.
    pub namespace: Option<String>,
    /// Its name within the namespace.
    pub name: String,
}

impl CalledTool {
    /// Name of the function in prompts.
    fn in_prompts(&self) -> String {
        prompt_name(self.namespace.as_deref(), &self.name)
    }
}

/// Name in prompts of a function that may be in a namespace.
pub fn prompt_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}.{name}"),
        None => name.to_owned(),
    }
}

/// The tools of a request, and those found by earlier searches.
#[derive(Debug, Default)]
pub struct ToolSet {
    definitions: Vec<Definition>,
    targets: Vec<CalledTool>,
}

impl ToolSet {
    /// Reads `tools`. Those that OpenAI runs itself are left out and reported.
    pub fn read(tools: Vec<Object<ToolFields>>, body: &mut Body<'_>) -> Result<Self, ApiError> {
        let mut set = Self::default();
        for (i, Object(tool)) in tools.into_iter().enumerate() {
            set.add(&format!("tools[{i}]"), tool, false, body)?;
        }
        Ok(set)
    }

    /// Adds tools found by a search, and returns their definitions as text. They can be called, but are not listed at
    /// the beginning of the prompt, which stays the same.
    pub fn add_found(
        &mut self,
        at: &str,
        tools: Vec<Object<ToolFields>>,
        body: &mut Body<'_>,
    ) -> Result<Vec<String>, ApiError> {
        let before = self.definitions.len();
        for (i, Object(tool)) in tools.into_iter().enumerate() {
            self.add(&format!("{at}.tools[{i}]"), tool, true, body)?;
        }
        Ok(self.definitions[before..].iter().map(Definition::text).collect())
    }

    /// Adds the tools of an input item, as if they were in `tools`. Known ones are skipped.
    pub fn add_more(&mut self, at: &str, tools: Vec<Object<ToolFields>>, body: &mut Body<'_>) -> Result<(), ApiError> {
        let mut more = Self::default();
        for (i, Object(tool)) in tools.into_iter().enumerate() {
            more.add(&format!("{at}.tools[{i}]"), tool, false, body)?;
        }
        for (definition, target) in more.definitions.into_iter().zip(more.targets) {
            if !self.targets.contains(&target) {
                self.definitions.push(definition);
                self.targets.push(target);
            }
        }
        Ok(())
    }

    fn add(&mut self, at: &str, tool: ToolFields, found: bool, body: &mut Body<'_>) -> Result<(), ApiError> {
        let Some(kind) = tool.kind.as_deref() else { return Err(invalid(format!("{at}.type is missing"))) };
        let deferred = found || tool.defer_loading == Some(true);
        match kind {
            "function" => self.push(Kind::Function, None, at, tool, deferred),
            "custom" => self.push(Kind::Custom, None, at, tool, deferred),
            "namespace" => {
                let Some(namespace) = tool.name else { return Err(invalid(format!("{at}.name is missing"))) };
                for (i, Object(inner)) in tool.tools.unwrap_or_default().into_iter().enumerate() {
                    let at = format!("{at}.tools[{i}]");
                    self.add_namespaced(&at, (&namespace, tool.description.as_deref()), inner, deferred, body)?;
                }
                Ok(())
            }
            TOOL_SEARCH if tool.execution.as_deref() == Some("client") => {
                let search = ToolFields { name: Some(TOOL_SEARCH.into()), ..tool };
                self.push(Kind::ToolSearch, None, at, search, deferred)
            }
            other => {
                body.ignore(format!("tools[].{}", truncate_for_error(other)));
                Ok(())
            }
        }
    }

    /// Adds a tool of a namespace, whose description is given.
    fn add_namespaced(
        &mut self,
        at: &str,
        (namespace, about): (&str, Option<&str>),
        tool: NamespacedToolFields,
        deferred: bool,
        body: &mut Body<'_>,
    ) -> Result<(), ApiError> {
        let kind = match tool.kind.as_deref() {
            None | Some("function") => Kind::Function,
            Some("custom") => Kind::Custom,
            Some(other) => {
                body.ignore(format!("tools[].tools[].{}", truncate_for_error(other)));
                return Ok(());
            }
        };
        let texts = [about, tool.description.as_deref()];
        let description = texts.into_iter().flatten().collect::<Vec<_>>().join("\n\n");
        let deferred = deferred || tool.defer_loading == Some(true);
        let fields = ToolFields {
            name: tool.name,
            description: Some(description).filter(|text| !text.is_empty()),
            parameters: tool.parameters,
            strict: tool.strict,
            format: tool.format,
            ..ToolFields::default()
        };
        self.push(kind, Some(namespace.to_owned()), at, fields, deferred)
    }

    fn push(
        &mut self,
        kind: Kind,
        namespace: Option<String>,
        at: &str,
        mut tool: ToolFields,
        deferred: bool,
    ) -> Result<(), ApiError> {
        if kind == Kind::Custom {
            tool.parameters = Some(Parameters(custom_parameters(at, tool.format.as_ref())?));
            tool.strict = None;
        }
        let Some(name) = tool.name else { return Err(invalid(format!("{at}.name is missing"))) };
        let target = CalledTool { kind, namespace, name };
        let (name, parameters) = (Some(target.in_prompts()), tool.parameters.map(|Parameters(schema)| schema));
        let definition = Definition::new(&format!("{at}.name"), name, tool.description, parameters, tool.strict)?;
        self.definitions.push(Definition { deferred, ..definition });
        self.targets.push(target);
        Ok(())
    }

    /// The tools that the model may or must call, and the tool of each function name.
    pub fn choose(self, choice: Option<ToolChoiceField>, parallel: bool) -> Result<(Tools, CalledTools), ApiError> {
        let choice = choice.map_or(Ok(ToolChoice::Auto), read_choice)?;
        Ok((Tools::new(self.definitions, choice, parallel)?, CalledTools(self.targets)))
    }
}

fn invalid(message: String) -> ApiError {
    ApiError::invalid("tools", message)
}

/// Parameters of a custom tool's function: its input is the only argument. A grammar is part of its schema: the model
/// sees it there, and forced calls follow it in formats with values without quotes.
fn custom_parameters(at: &str, format: Option<&Object<InputFormatFields>>) -> Result<Map<String, Value>, ApiError> {
    let mut input = json!({"type": "string"});
    if let Some(Object(InputFormatFields { kind, syntax, definition })) = format {
        match (kind.as_deref(), syntax.as_deref(), definition) {
            (None | Some("text"), ..) => {}
            (Some("grammar"), Some("lark"), Some(grammar)) => input[LARK] = grammar.as_str().into(),
            (Some("grammar"), Some("regex"), Some(pattern)) => input["pattern"] = format!("^(?:{pattern})$").into(),
            _ => {
                let forms =
                    "{\"type\": \"text\"} or {\"type\": \"grammar\", \"syntax\": lark or regex, \"definition\": …}";
                return Err(invalid(format!("{at}.format must be {forms}")));
            }
        }
    }
    let schema = json!({"type": "object", "properties": {"input": input}, "required": ["input"]});
    Ok(schema.as_object().cloned().unwrap_or_default())
}

fn read_choice(choice: ToolChoiceField) -> Result<ToolChoice, ApiError> {
    let choice = match choice {
        ToolChoiceField::Text(ToolMode::Auto) => return Ok(ToolChoice::Auto),
        ToolChoiceField::Text(ToolMode::None) => return Ok(ToolChoice::None),
        ToolChoiceField::Text(ToolMode::Required) => return Ok(ToolChoice::Required),
        ToolChoiceField::Other(choice) => choice,
    };
    let malformed = || ApiError::invalid("tool_choice", format!("tool_choice must be {TOOL_CHOICES}"));
    let NamedChoiceFields { kind, name, namespace, mode, tools } = choice;
    let function = |kind: Option<&str>, namespace: Option<&str>, name: Option<&str>| match (kind, name) {
        (Some("function" | "custom"), Some(name)) => Some(prompt_name(namespace, name)),
        (Some(TOOL_SEARCH), _) => Some(TOOL_SEARCH.to_owned()),
        _ => None,
    };
    if kind.as_deref() != Some("allowed_tools") {
        let name = function(kind.as_deref(), namespace.as_deref(), name.as_deref());
        return name.map(ToolChoice::Function).ok_or_else(malformed);
    }
    let name = |Object(tool): &Object<AllowedToolFields>| {
        function(tool.kind.as_deref(), tool.namespace.as_deref(), tool.name.as_deref())
    };
    // Tools that OpenAI runs itself are also left out here.
    let names = tools.unwrap_or_default().iter().filter_map(name).collect();
    Ok(ToolChoice::Allowed { names, required: mode == Some(ToolMode::Required) })
}

/// The tool of each function name.
#[derive(Debug, Default)]
pub struct CalledTools(Vec<CalledTool>);

impl CalledTools {
    /// The tool that the model means by this name. Models leave namespaces out; the bare name is enough if only one
    /// tool has it.
    pub fn find(&self, called: &str) -> CalledTool {
        let exact = self.0.iter().find(|target| target.in_prompts() == called);
        let mut named = self.0.iter().filter(|target| target.name == called);
        let only = match (named.next(), named.next()) {
            (Some(one), None) => Some(one),
            _ => None,
        };
        let unknown = || CalledTool { kind: Kind::Function, namespace: None, name: called.to_owned() };
        exact.or(only).cloned().unwrap_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::responses::ResponsesFields;

    fn read(tools: Value) -> Result<(ToolSet, Vec<String>), ApiError> {
        let text = json!({ "tools": tools }).to_string();
        let mut body = Body::parse(text.as_bytes())?;
        let fields: ResponsesFields = body.read()?;
        let set = ToolSet::read(fields.tools.unwrap_or_default(), &mut body)?;
        let ignored = body.rest().1.to_vec();
        Ok((set, ignored))
    }

    #[test]
    fn each_kind_of_tool_is_a_function_and_comes_back() {
        let (set, ignored) = read(json!([
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
            {"type": "namespace", "name": "n", "description": "About n.", "tools": [
                {"type": "function", "name": "g", "description": "Does g."}]},
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
            {"type": "web_search", "external_web_access": true}]))
        .unwrap();
        assert_eq!(ignored, ["tools[].external_web_access", "tools[].web_search"]);
        let names: Vec<&str> = set.definitions.iter().map(Definition::name).collect();
        assert_eq!(names, ["f", "patch", "n.g", "tool_search"]);
        assert!(set.definitions[1].text().contains("start: "));
        assert!(set.definitions[2].text().contains("About n.\\n\\nDoes g."));
        let (_, targets) = set.choose(None, true).unwrap();
        let namespaced = CalledTool { kind: Kind::Function, namespace: Some("n".into()), name: "g".into() };
        assert_eq!((targets.find("n.g"), targets.find("g")), (namespaced.clone(), namespaced));
        assert_eq!((targets.find("patch").kind, targets.find("tool_search").kind), (Kind::Custom, Kind::ToolSearch));
        assert_eq!(targets.find("x"), CalledTool { kind: Kind::Function, namespace: None, name: "x".into() });
    }
}

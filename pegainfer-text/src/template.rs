//! The checkpoint's chat template: a Jinja program that turns messages into a prompt.

mod budget;
mod dialect;
mod error;
mod files;
mod generation;
mod instrument;

use super::deepseek_v4;
use super::effort::Switches;
use super::parser::OutputFormat;
pub use error::TemplateError;
use files::{Source, Sources, read_json};
use minijinja::value::Value;
use minijinja::{Environment, Error};
use pegainfer_model_files::ModelFiles;
use serde_json::{Map, Value as Json, json};
use std::path::Path;

const NAME: &str = "chat_template";
/// The compiled chat templates of a checkpoint, and their properties.
pub struct ChatTemplate {
    program: Program,
    /// Renders requests with tools, if the checkpoint has a separate template for them.
    tool_use: Option<Program>,
    special_tokens: Map<String, Json>,
    output_format: OutputFormat,
    shows_later_system_messages: bool,
}

/// The program that renders prompts.
enum Program {
    Jinja(Box<Environment<'static>>, Switches),
    /// DeepSeek-V4, which has no Jinja template.
    DeepSeekV4(deepseek_v4::Efforts),
}

impl ChatTemplate {
    /// Loads the templates of the model at `path`, a folder or GGUF, that [`Sources::find`] finds. A model type without a template may have a built-in encoding;
    /// `None` if there is neither.
    pub fn load(path: &Path) -> Result<Option<Self>, TemplateError> {
        let files = ModelFiles::open(path)?;
        if let Some(Sources { default, tool_use, special_tokens }) = Sources::find(&files)? {
            return Self::new(&default, tool_use.as_ref(), special_tokens).map(Some);
        }
        if read_json(&files, "config.json")?["model_type"] == "deepseek_v4" {
            let (program, format) = (Program::DeepSeekV4(deepseek_v4::Efforts::load(path)), deepseek_v4::OUTPUT_FORMAT);
            return Ok(Some(Self::from_parts(program, None, Map::new(), format)));
        }
        files::warn_without(&files)?;
        Ok(None)
    }

    /// Compiles the template of all requests, or of requests without tools if those with tools have their own.
    fn new(
        default: &Source,
        tool_use: Option<&Source>,
        special_tokens: Map<String, Json>,
    ) -> Result<Self, TemplateError> {
        let (program, mut format) = compile(default, &special_tokens)?;
        let tool_use = tool_use.map(|source| compile(source, &special_tokens)).transpose()?;
        let tool_use = tool_use.map(|(program, with_tools)| {
            format.tools = with_tools.tools.or(format.tools);
            program
        });
        Ok(Self::from_parts(program, tool_use, special_tokens, format))
    }

    fn from_parts(
        program: Program,
        tool_use: Option<Program>,
        special_tokens: Map<String, Json>,
        output_format: OutputFormat,
    ) -> Self {
        let mut template =
            Self { program, tool_use, special_tokens, output_format, shows_later_system_messages: false };
        template.shows_later_system_messages = template.renders_later_system_messages();
        template
    }

    /// Output format of the model, detected from the template.
    pub fn output_format(&self) -> OutputFormat {
        self.output_format
    }

    /// Adds the template arguments for this `reasoning_effort` to the client's `kwargs`.
    ///
    /// Returns false if the effort has no effect on this model.
    ///
    /// # Errors
    /// One sentence for the client: the model does not support this effort.
    pub fn set_effort(&self, effort: &str, kwargs: &mut Map<String, Json>) -> Result<bool, String> {
        match &self.program {
            Program::Jinja(_, switches) => switches.set(effort, kwargs),
            Program::DeepSeekV4(efforts) => efforts.set(effort, kwargs).map(|()| true),
        }
    }

    /// True if prompts show system messages after the beginning. Some templates refuse them or leave them out.
    pub fn shows_later_system_messages(&self) -> bool {
        self.shows_later_system_messages
    }

    /// Renders a conversation with a later system message to see whether the prompt shows it.
    fn renders_later_system_messages(&self) -> bool {
        const TEXT: &str = "Be brief.";
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let messages = [message("user", "a"), message("assistant", "b"), message("system", TEXT), message("user", "c")];
        self.render(&messages, None, true, &Map::new()).is_ok_and(|prompt| prompt.contains(TEXT))
    }

    /// Text that ends an assistant's turn in prompts. `None` if the template does not show it.
    pub fn turn_end(&self) -> Option<String> {
        const ANSWER: &str = "The answer is 7.";
        let messages = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": ANSWER})];
        let prompt = self.render(&messages, None, false, &Map::new()).ok()?;
        prompt.rsplit_once(ANSWER).map(|(_, end)| end.to_owned())
    }

    /// Renders the prompt of `messages`. `kwargs` are the client's `chat_template_kwargs`; the other arguments override
    /// them.
    pub fn render(
        &self,
        messages: &[Json],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<String, TemplateError> {
        let with_tools = self.tool_use.as_ref().filter(|_| tools.is_some());
        let env = match with_tools.unwrap_or(&self.program) {
            Program::Jinja(env, _) => env,
            Program::DeepSeekV4(efforts) => {
                return deepseek_v4::render(efforts, messages, tools, add_generation_prompt, kwargs)
                    .map_err(TemplateError::Refused);
            }
        };
        let mut context = self.special_tokens.clone();
        context.extend(kwargs.clone());
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), tools.map_or(Json::Null, Json::from));
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        run(env, context)
    }
}

/// Renders the template of `env` with this context.
fn run(env: &Environment<'_>, context: Map<String, Json>) -> Result<String, TemplateError> {
    budget::begin(context.values().map(text_bytes).sum());
    let template = env.get_template(NAME).map_err(|e| explain(&e))?;
    template.render(Value::from_serialize(context)).map_err(|e| explain(&e))
}

/// Bytes of all strings in a JSON value.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

/// Compiles a template, and detects the model's output format from it.
fn compile(source: &Source, special_tokens: &Map<String, Json>) -> Result<(Program, OutputFormat), TemplateError> {
    let output_format = OutputFormat::detect(&source.text);
    let mut env = dialect::environment();
    let does_not_compile = |error| TemplateError::File {
        path: source.path.clone(),
        reason: format!("the chat template does not compile: {error}"),
    };
    let checked = instrument::instrument(&generation::without_marks(&source.text), NAME).map_err(does_not_compile)?;
    env.add_template_owned(NAME, checked).map_err(does_not_compile)?;
    let renders = |effort: &str| {
        let mut context = special_tokens.clone();
        context.insert("messages".into(), json!([{"role": "user", "content": "a"}]));
        context.insert("tools".into(), Json::Null);
        context.insert("add_generation_prompt".into(), true.into());
        context.insert("reasoning_effort".into(), effort.into());
        run(&env, context).is_ok()
    };
    let switches = Switches::detect(&source.text, output_format.reasoning, renders);
    Ok((Program::Jinja(Box::new(env), switches), output_format))
}

fn explain(error: &Error) -> TemplateError {
    match dialect::raised(error) {
        Some(message) => TemplateError::Refused(message.to_owned()),
        None => TemplateError::Render(error.to_string()),
    }
}

#[cfg(test)]
mod tests;

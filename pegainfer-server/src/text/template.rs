//! The checkpoint's chat template: a Jinja program that turns messages into a prompt.

mod dialect;

use super::deepseek_v4;
use super::effort::Switches;
use super::parser::OutputFormat;
use minijinja::value::Value;
use minijinja::{Environment, Error};
use serde_json::{Map, Value as Json, json};
use std::path::{Path, PathBuf};
use thiserror::Error as ThisError;

const NAME: &str = "chat_template";
/// Name of the default template when tokenizer_config.json lists several.
const DEFAULT_TEMPLATE: &str = "default";
/// Special tokens of tokenizer_config.json that a template may use.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Why there is no usable template, or no prompt.
#[derive(Debug, ThisError)]
pub enum TemplateError {
    /// A file could not be read or parsed.
    #[error("{path}: {reason}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The template refused the conversation with `raise_exception`.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the chat template cannot render these messages: {0}")]
    Render(String),
}

/// A compiled chat template and the special tokens it may use.
pub struct ChatTemplate {
    program: Program,
    special_tokens: Map<String, Json>,
    output_format: OutputFormat,
}

/// The program that renders prompts.
enum Program {
    Jinja(Box<Environment<'static>>, Switches),
    /// DeepSeek-V4, which has no Jinja template.
    DeepSeekV4(deepseek_v4::Efforts),
}

impl ChatTemplate {
    /// Loads `chat_template.jinja`, else the template inside `tokenizer_config.json`, else the built-in encoding of a model type
    /// that has no template; `None` if there is none.
    pub fn load(dir: &Path) -> Result<Option<Self>, TemplateError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?;
        let path = dir.join("chat_template.jinja");
        let (source, path) = if path.is_file() {
            let text = std::fs::read_to_string(&path)
                .map_err(|e| TemplateError::File { path: path.clone(), reason: e.to_string() })?;
            (Some(text), path)
        } else {
            (embedded_template(&config), config_path)
        };
        let Some(source) = source else { return Self::without_template(dir) };
        let special_tokens = SPECIAL_TOKENS
            .iter()
            .filter_map(|&name| Some((name.to_string(), Json::from(token_text(&config[name])?))))
            .collect();
        Self::new(source, special_tokens)
            .map(Some)
            .map_err(|e| TemplateError::File { path, reason: format!("the chat template does not compile: {e}") })
    }

    /// The built-in encoding of a model type that has no template.
    fn without_template(dir: &Path) -> Result<Option<Self>, TemplateError> {
        let is_deepseek_v4 = read_json(&dir.join("config.json"))?["model_type"] == "deepseek_v4";
        Ok(is_deepseek_v4.then(|| Self {
            program: Program::DeepSeekV4(deepseek_v4::Efforts::load(dir)),
            special_tokens: Map::new(),
            output_format: deepseek_v4::OUTPUT_FORMAT,
        }))
    }

    /// Compiles a template.
    fn new(source: String, special_tokens: Map<String, Json>) -> Result<Self, Error> {
        let output_format = OutputFormat::of_template(&source);
        let mut env = dialect::environment();
        env.add_template_owned(NAME, source.clone())?;
        let renders = |effort: &str| {
            let mut context = special_tokens.clone();
            context.insert("messages".into(), json!([{"role": "user", "content": "a"}]));
            context.insert("tools".into(), Json::Null);
            context.insert("add_generation_prompt".into(), true.into());
            context.insert("reasoning_effort".into(), effort.into());
            run(&env, context).is_ok()
        };
        let switches = Switches::of_template(&source, output_format.reasoning, renders);
        Ok(Self { program: Program::Jinja(Box::new(env), switches), special_tokens, output_format })
    }

    /// Output format of the model, as the template tells it.
    pub fn output_format(&self) -> OutputFormat {
        self.output_format
    }

    /// Adds the template arguments for this `reasoning_effort` to the client's `kwargs`.
    ///
    /// False if it has no effect on this model.
    ///
    /// # Errors
    /// One sentence for the client: the model does not support this effort.
    pub fn set_effort(&self, effort: &str, kwargs: &mut Map<String, Json>) -> Result<bool, String> {
        match &self.program {
            Program::Jinja(_, switches) => switches.set(effort, kwargs),
            Program::DeepSeekV4(efforts) => efforts.set(effort, kwargs).map(|()| true),
        }
    }

    /// Whether prompts show system messages that are not at the beginning. Some templates refuse them, or leave them out.
    pub fn shows_later_system_messages(&self) -> bool {
        const TEXT: &str = "Be brief.";
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let messages = [message("user", "a"), message("assistant", "b"), message("system", TEXT), message("user", "c")];
        self.render(&messages, None, true, &Map::new()).is_ok_and(|prompt| prompt.contains(TEXT))
    }

    /// Renders the prompt of `messages`. `kwargs` are the client's `chat_template_kwargs`; the other arguments override them.
    pub fn render(
        &self,
        messages: &[Json],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<String, TemplateError> {
        let env = match &self.program {
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

/// Renders the template of `env` with these arguments.
fn run(env: &Environment<'_>, context: Map<String, Json>) -> Result<String, TemplateError> {
    let template = env.get_template(NAME).map_err(|e| explain(&e))?;
    template.render(Value::from_serialize(context)).map_err(|e| explain(&e))
}

fn read_json(path: &Path) -> Result<Json, TemplateError> {
    if !path.is_file() {
        return Ok(Json::Null);
    }
    let file = |reason: String| TemplateError::File { path: path.to_path_buf(), reason };
    let text = std::fs::read_to_string(path).map_err(|e| file(e.to_string()))?;
    serde_json::from_str(&text).map_err(|e| file(format!("not valid JSON: {e}")))
}

/// The template in tokenizer_config.json: `chat_template` is a string, or a list of `{name, template}`.
fn embedded_template(config: &Json) -> Option<String> {
    match &config["chat_template"] {
        Json::String(text) => Some(text.clone()),
        Json::Array(named) => {
            let default = named.iter().find(|t| t["name"] == DEFAULT_TEMPLATE).or_else(|| named.first())?;
            default["template"].as_str().map(str::to_string)
        }
        _ => None,
    }
}

/// Text of a special token, which is written as a string or as an object with its `content`.
fn token_text(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

fn explain(error: &Error) -> TemplateError {
    match dialect::raised(error) {
        Some(message) => TemplateError::Refused(message.to_owned()),
        None => TemplateError::Render(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use crate::text::parser::{ReasoningStart, ToolFormat};

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source.to_string(), Map::new()).unwrap()
    }

    fn render(template: &ChatTemplate, messages: Json) -> Result<String, TemplateError> {
        template.render(messages.as_array().unwrap(), None, true, &Map::new())
    }

    #[test]
    fn the_fixture_conversations_render_to_the_reference_prompts() {
        let template = ChatTemplate::load(&testing::model_dir()).unwrap().unwrap();
        let chats = testing::fixture_cases().into_iter().filter(|case| case["kind"] == "chat");
        let mut seen = 0;
        for case in chats {
            let messages = case["messages"].as_array().unwrap();
            let tools = case["tools"].as_array().map(Vec::as_slice);
            let prompt = template.render(messages, tools, true, &Map::new()).unwrap();
            assert_eq!(prompt, case["prompt"], "{}", case["name"]);
            seen += 1;
        }
        assert!(seen >= 6, "the fixture lost its chat cases");
    }

    #[test]
    fn the_template_inside_tokenizer_config_gives_the_same_prompt() {
        let dir = testing::TempDir::new("template");
        std::fs::copy(testing::model_dir().join("tokenizer_config.json"), dir.path().join("tokenizer_config.json"))
            .unwrap();
        let messages = json!([{"role": "user", "content": "hi"}]);
        let from_config = ChatTemplate::load(dir.path()).unwrap().unwrap();
        let from_file = ChatTemplate::load(&testing::model_dir()).unwrap().unwrap();
        assert_eq!(render(&from_config, messages.clone()).unwrap(), render(&from_file, messages).unwrap());
    }

    #[test]
    fn a_list_of_named_templates_uses_the_default_one() {
        let config = json!({"chat_template": [
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]});
        assert_eq!(embedded_template(&config).unwrap(), "plain");
        assert_eq!(embedded_template(&json!({})), None);
    }

    #[test]
    fn kwargs_reach_the_template_and_cannot_replace_the_messages() {
        let template = template("{{ messages[0].content }} {{ enable_thinking }} {{ missing }}");
        let kwargs = json!({"enable_thinking": false, "messages": "no"});
        let messages = [json!({"content": "hi"})];
        let text = template.render(&messages, None, true, kwargs.as_object().unwrap()).unwrap();
        assert_eq!(text, "hi False ");
    }

    #[test]
    fn a_template_tells_whether_it_shows_later_system_messages() {
        let all = "{% for message in messages %}{{ message.content }}{% endfor %}";
        let first = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}";
        let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
            {{ raise_exception('no') }}{% endif %}{% endfor %}";
        let shows = |source| template(source).shows_later_system_messages();
        assert_eq!([shows(all), shows(first), shows(strict)], [true, false, false]);
    }

    #[test]
    fn errors_raised_by_the_template_are_distinguished_from_its_failures() {
        let raised = render(&template("{{ raise_exception('roles must alternate') }}"), json!([])).unwrap_err();
        assert_eq!(raised.to_string(), "the chat template refuses these messages: roles must alternate");
        let failed = render(&template("{{ messages[0].content + 1 }}"), json!([{}])).unwrap_err();
        assert!(matches!(failed, TemplateError::Render(_)), "{failed}");
    }

    /// An official template from the directory `PEGAINFER_TEST_TEMPLATES`.
    fn official(file: &str) -> ChatTemplate {
        let dir = std::env::var_os("PEGAINFER_TEST_TEMPLATES").expect("PEGAINFER_TEST_TEMPLATES is not set");
        template(&std::fs::read_to_string(Path::new(&dir).join(file)).unwrap())
    }

    #[test]
    #[ignore = "needs the official templates: PEGAINFER_TEST_TEMPLATES=DIR"]
    fn the_official_qwen3_template_renders() {
        let template = official("qwen3/qwen3.chat_template.jinja");
        let user = json!([{"role": "user", "content": "hi"}]);
        assert_eq!(render(&template, user.clone()).unwrap(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        let kwargs = json!({"enable_thinking": false});
        let text = template.render(user.as_array().unwrap(), None, true, kwargs.as_object().unwrap()).unwrap();
        assert!(text.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{text}");
        let history = json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"city": "Zürich", "n": 1.0}}}]},
            {"role": "tool", "content": "sunny"}]);
        let tools = [json!({"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}})];
        let text = template.render(history.as_array().unwrap(), Some(&tools), true, &Map::new()).unwrap();
        assert!(
            text.contains(
                "{\"type\": \"function\", \"function\": {\"name\": \"get\", \"parameters\": {\"type\": \"object\"}}}"
            ),
            "{text}"
        );
        assert!(text.contains("<tool_call>\n{\"name\": \"get\", \"arguments\": {\"city\": \"Zürich\", \"n\": 1.0}}\n</tool_call><|im_end|>\n"), "{text}");
        assert!(text.contains("<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"), "{text}");
    }

    #[test]
    #[ignore = "needs the official templates: PEGAINFER_TEST_TEMPLATES=DIR"]
    fn the_official_qwen3_5_template_renders() {
        let template = official("qwen3.5/qwen3.5-4B-9B-27B.chat_template.jinja");
        let expected = OutputFormat { reasoning: true, tools: Some(ToolFormat::Qwen3Coder) };
        assert_eq!(template.output_format(), expected);
        let history = json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "get", "arguments": {"city": "Bern", "days": [1, 2]}}}]},
            {"role": "tool", "content": "sunny"}]);
        let text = render(&template, history).unwrap();
        let call = "<tool_call>\n<function=get>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n[1, 2]\n\
            </parameter>\n</function>\n</tool_call><|im_end|>\n";
        assert!(text.contains(call), "{text}");
        assert_eq!(ReasoningStart::after(&text), ReasoningStart::Opened, "{text}");
    }
}

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
use serde_json::{Map, Value as Json, json};
use std::path::Path;

const NAME: &str = "chat_template";
/// The compiled chat templates of a checkpoint, and what is known of them.
pub struct ChatTemplate {
    program: Program,
    /// Renders requests with tools, where the checkpoint has another template for them.
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
    /// Loads the templates that [`Sources::find`] finds, else the built-in encoding of a model type that has no template; `None` if
    /// there is none.
    pub fn load(dir: &Path) -> Result<Option<Self>, TemplateError> {
        if let Some(Sources { default, tool_use, special_tokens }) = Sources::find(dir)? {
            return Self::new(&default, tool_use.as_ref(), special_tokens).map(Some);
        }
        if read_json(&dir.join("config.json"))?["model_type"] == "deepseek_v4" {
            let (program, format) = (Program::DeepSeekV4(deepseek_v4::Efforts::load(dir)), deepseek_v4::OUTPUT_FORMAT);
            return Ok(Some(Self::of(program, None, Map::new(), format)));
        }
        files::warn_without(dir)?;
        Ok(None)
    }

    /// Compiles the template of all requests, or of those without tools if there is another one for these.
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
        Ok(Self::of(program, tool_use, special_tokens, format))
    }

    fn of(
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

    /// True if prompts show system messages that are not at the beginning. Some templates refuse them, or leave them out.
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

    /// What follows an answer in prompts: the end of an assistant's turn. `None` if the template does not show it.
    pub fn turn_end(&self) -> Option<String> {
        const ANSWER: &str = "The answer is 7.";
        let messages = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": ANSWER})];
        let prompt = self.render(&messages, None, false, &Map::new()).ok()?;
        prompt.rsplit_once(ANSWER).map(|(_, end)| end.to_owned())
    }

    /// Renders the prompt of `messages`. `kwargs` are the client's `chat_template_kwargs`; the other arguments override them.
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

/// Renders the template of `env` with these arguments.
fn run(env: &Environment<'_>, context: Map<String, Json>) -> Result<String, TemplateError> {
    budget::begin(context.values().map(text_bytes).sum());
    let template = env.get_template(NAME).map_err(|e| explain(&e))?;
    template.render(Value::from_serialize(context)).map_err(|e| explain(&e))
}

/// Bytes of the texts in a JSON value.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

/// Compiles a template, and finds out what it says of the model's output.
fn compile(source: &Source, special_tokens: &Map<String, Json>) -> Result<(Program, OutputFormat), TemplateError> {
    let output_format = OutputFormat::of_template(&source.text);
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
    let switches = Switches::of_template(&source.text, output_format.reasoning, renders);
    Ok((Program::Jinja(Box::new(env), switches), output_format))
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

    fn source(text: &str) -> Source {
        Source { text: text.to_owned(), path: "t".into() }
    }

    fn template(text: &str) -> ChatTemplate {
        ChatTemplate::new(&source(text), None, Map::new()).unwrap()
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
    fn requests_with_tools_take_the_template_for_tools() {
        let tools = source("<tools></tools><tool_call>\n<function={{ tools[0].name }}>");
        let template = ChatTemplate::new(&source("plain"), Some(&tools), Map::new()).unwrap();
        let render = |tools| template.render(&[json!({})], tools, true, &Map::new()).unwrap();
        assert_eq!(render(None), "plain");
        assert!(render(Some(&[json!({"name": "get"})][..])).ends_with("<function=get>"));
        let format = OutputFormat::of_template(&tools.text);
        assert_eq!((template.output_format().tools, format.tools.is_some()), (format.tools, true));
    }

    #[test]
    fn marks_for_training_are_rendered_as_nothing() {
        let text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}";
        let messages = json!([{"role": "user", "content": "hi"}]);
        assert_eq!(render(&template(text), messages).unwrap(), "<|im_start|>user\nhi<|im_end|>");
        assert_eq!(template(text).turn_end().unwrap(), "<|im_end|>");
        let error = ChatTemplate::new(&source("{% generation %}"), None, Map::new()).err().unwrap().to_string();
        assert!(error.starts_with("t: the chat template does not compile"), "{error}");
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

    #[test]
    fn a_template_takes_no_more_than_its_budget() {
        // Each would take at least a hundred gigabytes, or the whole stack.
        let mut wrong = Vec::new();
        let long = "{% set x = 'x' * 1000000 %}";
        for text in [
            "{{ ('x' * 1000000)|replace('x', 'y' * 10000)|length }}",
            "{{ ('x' * 1000000).replace('x', 'y' * 10000)|length }}",
            "{{ ('x' * 1000000)|replace('', 'y' * 10000)|length }}",
            "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
            "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[1, 2]) %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('xx') }}",
            "{{ ['x' * 1000000] * 1000000 ~ '' }}",
            "{{ (['x' * 1000000] * 1000000)|join }}",
            "{{ (['x'] * 1000000)|join('y' * 1000000) }}",
            "{{ ('y' * 1000000).join(['x'] * 1000000) }}",
            "{{ (['x' * 1000000] * 1000000)|tojson }}",
            "{{ (['x' * 1000000] * 1000000)|string }}",
            "{{ (['x' * 1000000] * 1000000)|upper }}",
            "{{ (['x' * 1000000] * 1000000) }}",
            "{{ ('x\n' * 1000000)|indent(60000) }}",
            "{{ ('x\n' * 1000000)|indent(width=60000) }}",
            "{{ ([[]] * 100000)|tojson(indent=1000) }}",
            "{{ '%999999999999d'|format(1) }}",
            "{{ '{:>99999999999}'.format(1) }}",
            "{{ [1]|batch(99999999999, 0) }}",
            "{{ [1]|slice(99999999999) }}",
            "{{ [1] * 4611686018427387904 }}",
            "{{ ('x' * 30000000)|list|length }}",
            "{{ ('x ' * 30000000).split()|length }}",
            "{% for i in range(90000) %}{% set ns = namespace(x=x) %}TEXT{{ 'x' * 100000 }}{% endfor %}",
            &format!(
                "{long}{{% set l = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% set l.x = l.x + [x[1:]] %}}{{% endfor %}}"
            ),
            &format!("{{% set x %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}", "raw ".repeat(10_000)),
            &format!(
                "{{% macro m(x) -%}}{}{{% endmacro %}}{{% set x %}}{{% for i in range(99999) %}}{{{{ m(x) }}}}{{% endfor %}}{{% endset %}}",
                "raw ".repeat(10_000)
            ),
        ] {
            let result = render(&template(text), json!([{"role": "user", "content": "a"}]));
            let error = result.err().map_or("no error".to_owned(), |error| error.to_string());
            let text = text.get(..120).unwrap_or(text);
            let refused =
                error.starts_with("the chat template cannot render these messages: ") && !error.contains("fuel");
            wrong.extend((!refused).then(|| format!("{text}: {error}")));
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn large_messages_have_a_larger_budget() {
        let text = "{% for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1].strip() + '\n' }}{% endfor %}";
        let content = "text ".repeat(400_000);
        let messages = vec![json!({"role": "user", "content": content}); 10];
        let prompt = render(&template(text), messages.into()).unwrap();
        assert_eq!(prompt.len(), 10 * (content.len() - 1 + "<user>\n".len()));
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

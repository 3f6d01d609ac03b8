//! Tests of chat templates.

use super::*;
use crate::parser::{ReasoningStart, ToolFormat};
use pegainfer_testing as testing;

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
    let gguf = testing::model_dir().with_file_name("qwen3-tiny-256-gguf");
    let from_file = ChatTemplate::load(&testing::model_dir()).unwrap().unwrap();
    for other in [dir.path(), &gguf] {
        let from_config = ChatTemplate::load(other).unwrap().unwrap();
        assert_eq!(render(&from_config, messages.clone()).unwrap(), render(&from_file, messages.clone()).unwrap());
    }
}

#[test]
fn requests_with_tools_take_the_template_for_tools() {
    let tools = source("<tools></tools><tool_call>\n<function={{ tools[0].name }}>");
    let template = ChatTemplate::new(&source("plain"), Some(&tools), Map::new()).unwrap();
    let render = |tools| template.render(&[json!({})], tools, true, &Map::new()).unwrap();
    assert_eq!(render(None), "plain");
    assert!(render(Some(&[json!({"name": "get"})][..])).ends_with("<function=get>"));
    let format = OutputFormat::detect(&tools.text);
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
        "{{ (['x'] * 10000)|join('y' * 1000000) }}",
        "{{ ('y' * 1000000).join(['x'] * 10000) }}",
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
        let refused = error.starts_with("the chat template cannot render these messages: ") && !error.contains("fuel");
        wrong.extend((!refused).then(|| format!("{text}: {error}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn large_messages_have_a_larger_budget() {
    let text =
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1].strip() + '\n' }}{% endfor %}";
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

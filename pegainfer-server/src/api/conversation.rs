//! Messages, tools and template arguments of a chat, and the prompt that they are rendered to.

use super::fields::{Fields, describe};
use super::messages;
use super::state::AppState;
use super::structured::Structured;
use super::tools::Tools;
use crate::error::ApiError;
use crate::ids::random_u64;
use crate::text::parser::{OutputParser, ParserOptions, ReasoningStart, ToolFormat, forced_grammar, grammar_or};
use crate::text::{GrammarSource, ReasoningLimits};
use serde_json::{Map, Value};

/// Template arguments that `chat_template_kwargs` must not replace.
const RESERVED_KWARGS: [&str; 5] = ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"];

/// Values of `reasoning_effort`: OpenAI's, and DeepSeek's `max`. The chat template defines what they do.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// The part of a body that the chat template turns into a prompt.
pub struct Conversation {
    messages: Vec<Value>,
    tools: Tools,
    include_reasoning: bool,
    add_generation_prompt: bool,
    /// The output continues the last message.
    continued: bool,
    kwargs: Map<String, Value>,
    effort: Option<&'static str>,
    /// Maximum number of reasoning tokens.
    budget: Option<usize>,
    structured: Option<Structured>,
}

/// A rendered conversation.
pub struct Rendered {
    /// The prompt.
    pub prompt: String,
    /// Output parser of each choice.
    pub parsers: Vec<OutputParser>,
    /// Structure that the output must have.
    pub structured: Option<Structured>,
    /// Constraints on the reasoning before the output.
    pub thinking: Option<ReasoningLimits>,
}

impl Conversation {
    /// Parses the fields of a conversation.
    pub fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED_KWARGS.iter().find(|&&name| kwargs.contains_key(name)) {
            let message = format!("chat_template_kwargs must not hold {name}");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        let tools = Tools::parse(fields)?;
        let continued = fields.bool("continue_final_message")?.unwrap_or(false);
        let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(!continued);
        if continued && add_generation_prompt {
            let message = "continue_final_message needs \"add_generation_prompt\": false";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        if tools.forced() && !add_generation_prompt {
            let message = "tool_choice can force a call only with \"add_generation_prompt\": true";
            return Err(ApiError::invalid("tool_choice", message));
        }
        let structured = Structured::parse(fields)?;
        if let Some(Structured { field, .. }) = structured.as_ref().filter(|_| tools.forced()) {
            let message = format!("{field} constrains the output, but tool_choice forces a call");
            return Err(ApiError::invalid(field, message));
        }
        Ok(Self {
            messages: messages::parse(fields)?,
            tools,
            include_reasoning: fields.bool("include_reasoning")?.unwrap_or(true),
            add_generation_prompt,
            continued,
            kwargs,
            effort: parse_effort(fields)?,
            budget: fields.integer("thinking_token_budget", 0..=i32::MAX.into())?.map(|n| n as usize),
            structured,
        })
    }

    /// Renders the prompt and builds the parsers of its `n` outputs.
    pub fn render(mut self, state: &AppState, n: usize) -> Result<Rendered, ApiError> {
        let Some(template) = &state.checkpoint.template else {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        };
        if let Some(effort) = self.effort {
            let unsupported = |e| ApiError::invalid("reasoning_effort", e).with_code("unsupported_parameter");
            template.set_effort(effort, &mut self.kwargs).map_err(unsupported)?;
        }
        let format = template.output_format();
        let tools = self.tools.format(format.tools)?;
        let shown = tools.map(|_| self.tools.definitions.as_slice());
        let tells_reasoning = format.reasoning && state.grammars.knows_reasoning();
        if self.structured.is_some() && !tells_reasoning {
            // The structure covers the whole text: no reasoning may come before it.
            if *self.kwargs.entry("enable_thinking").or_insert(false.into()) == true {
                let message = "enable_thinking: this model cannot reason before structured output";
                return Err(ApiError::invalid("chat_template_kwargs", message).with_code("unsupported_parameter"));
            }
        }
        let mut prompt = template
            .render(&self.messages, shown, self.add_generation_prompt, &self.kwargs)
            .map_err(|e| ApiError::invalid("messages", e.to_string()))?;
        if self.continued {
            prompt.truncate(self.end_of_last_message(&prompt)?);
        }
        let mut reasoning = if format.reasoning { ReasoningStart::after(&prompt) } else { ReasoningStart::Never };
        let thinking = match format.reasoning && reasoning.may_follow(&prompt, self.continued) {
            true => self.thinking(reasoning, tools == Some(ToolFormat::Qwen3Coder), state)?,
            false => None,
        };
        if let Some(Structured { field, source }) = &mut self.structured {
            if thinking.is_none() {
                prompt += reasoning.close(format.tools);
                reasoning = ReasoningStart::Never;
            }
            if let Some(format) = tools {
                let either = grammar_or(source, format, &self.tools.definitions, self.tools.max_calls);
                let Some(either) = either.map_err(not_enforced)? else {
                    let message =
                        format!("{field}.grammar cannot be combined with tools: send \"tool_choice\": \"none\"");
                    return Err(ApiError::invalid(field, message).with_code("unsupported_parameter"));
                };
                *source = GrammarSource::Lark(either);
            }
        }
        if let Some(tools) = tools.filter(|_| self.tools.forced()) {
            // The call comes first: no reasoning may come before it.
            prompt = prompt + reasoning.close(Some(tools)) + &self.tools.prefix.text(tools);
            reasoning = ReasoningStart::Never;
            let Tools { prefix, definitions, max_calls } = &self.tools;
            let source = forced_grammar(tools, prefix, definitions, *max_calls).map_err(not_enforced)?;
            let source = source.map(GrammarSource::Lark);
            self.structured = source.map(|source| Structured { field: "tools", source });
        }
        let parser = |id_seed| {
            OutputParser::new(ParserOptions {
                reasoning,
                include_reasoning: self.include_reasoning,
                tools,
                prefix: self.tools.prefix.clone(),
                definitions: self.tools.definitions.clone(),
                max_calls: self.tools.max_calls,
                id_seed,
            })
        };
        let parsers = (0..n).map(|_| random_u64().map(parser)).collect::<Result<_, _>>()?;
        Ok(Rendered { prompt, parsers, structured: self.structured, thinking })
    }

    /// Constraints on the reasoning before the output, if any have to be enforced.
    fn thinking(
        &self,
        start: ReasoningStart,
        call_ends_it: bool,
        state: &AppState,
    ) -> Result<Option<ReasoningLimits>, ApiError> {
        if self.tools.forced() || (self.structured.is_none() && self.budget.is_none()) {
            return Ok(None);
        }
        if self.budget.is_some() {
            check_budget(state)?;
        }
        let thinking = ReasoningLimits { start, call_ends_it, budget: self.budget };
        Ok(state.grammars.knows_reasoning().then_some(thinking))
    }

    /// Byte offset in the prompt where the text of the last message ends. Templates may trim it.
    fn end_of_last_message(&self, prompt: &str) -> Result<usize, ApiError> {
        let text = self.messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default().trim();
        match prompt.rfind(text) {
            Some(at) if !text.is_empty() => Ok(at + text.len()),
            _ => Err(ApiError::invalid("messages", "there is nothing to continue: the last message has no text")),
        }
    }
}

/// A strict function asks for what no grammar can express.
fn not_enforced(reason: String) -> ApiError {
    ApiError::invalid("tools", format!("tools: a function is strict, but {reason}")).with_code("unsupported_parameter")
}

fn parse_effort(fields: &mut Fields) -> Result<Option<&'static str>, ApiError> {
    let Some(value) = fields.remove("reasoning_effort") else { return Ok(None) };
    let effort = EFFORTS.into_iter().find(|effort| value == *effort);
    effort.map(Some).ok_or_else(|| {
        let message = format!("reasoning_effort must be one of {}, got {}", EFFORTS.join(", "), describe(&value));
        ApiError::invalid("reasoning_effort", message)
    })
}

/// Checks that `thinking_token_budget` can be enforced.
fn check_budget(state: &AppState) -> Result<(), ApiError> {
    let masks = !state.engine.limits().unsupported.contains(&"structured_outputs");
    if masks && state.grammars.knows_reasoning() {
        return Ok(());
    }
    let message = "thinking_token_budget is not implemented for this model";
    Err(ApiError::invalid("thinking_token_budget", message).with_code("unsupported_parameter"))
}

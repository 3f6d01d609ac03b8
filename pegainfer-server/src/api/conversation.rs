//! Messages, tools and template arguments of a chat, and the prompt that they are rendered to.

use super::body::RequestContext;
use super::message::{Message, Role};
use super::plain_text::PlainText;
use super::schema::conversation::Effort;
use super::state::{AppState, tokenizer_error};
use super::structured::Structured;
use super::system;
use super::tools::Tools;
use crate::error::ApiError;
use crate::ids::random_u64;
use crate::text::parser::{
    OutputFormat, OutputParser, ParserOptions, ReasoningStart, ToolFormat, forced_grammar, grammar_or,
};
use crate::text::{Caller, GrammarSource, ReasoningLimits, Tokenizer};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Template arguments that `chat_template_kwargs` must not replace.
const RESERVED_KWARGS: [&str; 5] = ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"];

/// The names that an API has for the fields of a chat, for errors.
#[derive(Debug)]
pub struct FieldNames {
    /// The messages.
    pub messages: &'static str,
    /// How much to reason.
    pub effort: &'static str,
    /// Maximum number of reasoning tokens.
    pub thinking_budget: &'static str,
    /// Strings that end the text.
    pub stop: &'static str,
    /// Maximum number of tokens to generate.
    pub max_tokens: &'static str,
}

impl FieldNames {
    /// The names of OpenAI's chat API.
    pub const CHAT: Self = Self {
        messages: "messages",
        effort: "reasoning_effort",
        thinking_budget: "thinking_token_budget",
        stop: "stop",
        max_tokens: "max_tokens",
    };
}

impl Default for &'static FieldNames {
    fn default() -> Self {
        &FieldNames::CHAT
    }
}

/// What the chat template turns into a prompt, and what shapes the output.
#[derive(Debug, Default)]
pub struct Conversation {
    /// Names of the fields in the API that was called.
    pub names: &'static FieldNames,
    /// The messages, at least one.
    pub messages: Vec<Message>,
    /// Functions that the model may or has to call.
    pub tools: Tools,
    /// Structure that the output must have. A forced call comes before it.
    pub structured: Option<Structured>,
    /// Arguments of the chat template.
    pub template_kwargs: Map<String, Value>,
    /// How much to reason.
    pub effort: Option<Effort>,
    /// Maximum number of reasoning tokens.
    pub thinking_budget: Option<usize>,
    /// Whether the reasoning is part of the output.
    pub include_reasoning: bool,
    /// Whether the prompt ends with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the output continues the last message.
    pub continue_final_message: bool,
}

/// How a conversation becomes token ids.
#[derive(Debug, Clone, Copy)]
pub struct PromptOptions {
    /// Number of outputs that follow the prompt.
    pub n: usize,
    /// Whether to run the tokenizer's post-processor (BOS) over the prompt.
    pub add_special_tokens: bool,
    /// Whether a prompt that cannot fit the context is refused before it is tokenized.
    pub is_bounded: bool,
}

/// A rendered conversation.
pub struct Rendered {
    /// The prompt, in segments that are tokenized one by one; most prompts have one.
    pub prompt: Vec<String>,
    /// Output parser of each choice.
    pub parsers: Vec<OutputParser>,
    /// Structure that the output must have.
    pub structured: Option<Structured>,
    /// Constraints on the reasoning before the output.
    pub thinking: Option<ReasoningLimits>,
}

impl Conversation {
    /// Checks that the parts of a conversation fit each other.
    pub fn check(mut self) -> Result<Self, ApiError> {
        if let Some(name) = RESERVED_KWARGS.iter().find(|&&name| self.template_kwargs.contains_key(name)) {
            let message = format!("chat_template_kwargs must not hold {name}");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        if self.continue_final_message && self.add_generation_prompt {
            let message = "continue_final_message needs \"add_generation_prompt\": false";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        if self.tools.forced() {
            if !self.add_generation_prompt {
                let message = "tool_choice can force a call only with \"add_generation_prompt\": true";
                return Err(ApiError::invalid("tool_choice", message));
            }
            // The output is the call, whose own schema constrains it.
            self.structured = None;
        }
        Ok(self)
    }

    /// Renders the prompt and tokenizes it, off the async threads.
    pub async fn encode(
        self,
        state: &Arc<AppState>,
        context: &RequestContext,
        options: PromptOptions,
    ) -> Result<(Rendered, Vec<u32>), ApiError> {
        let (work_state, share) = (state.clone(), context.share.clone());
        let work = move |tokenizer: &Arc<Tokenizer>, caller: &Caller<'_>| {
            let _share = share;
            let rendered = self.render(&work_state, options.n)?;
            if caller.is_gone() {
                // Nobody reads this.
                return Ok((rendered, Vec::new()));
            }
            let segments = &rendered.prompt;
            if options.is_bounded {
                work_state.check_length(segments.iter().map(String::len).sum(), "messages")?;
            }
            // The tokenizer's own special tokens would be added to each segment.
            let add_special_tokens = options.add_special_tokens && segments.len() == 1;
            let mut ids = Vec::new();
            for segment in segments {
                let segment = tokenizer.encode(segment, add_special_tokens);
                ids.append(&mut segment.map_err(|error| tokenizer_error(&error, "messages"))?);
            }
            Ok((rendered, ids))
        };
        state.work(context.size, work).await?
    }

    /// Renders the prompt and builds the parsers of its `n` outputs.
    fn render(mut self, state: &AppState, n: usize) -> Result<Rendered, ApiError> {
        let Some(template) = &state.checkpoint.template else {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        };
        let names = self.names;
        self.set_effort(state)?;
        let format = template.output_format();
        self.check_roles(format)?;
        system::arrange(&mut self.messages, template);
        if format.tools != Some(ToolFormat::Hermes) {
            // Only that format writes arguments as they are given; the others need an object.
            self.messages.iter_mut().for_each(Message::complete_arguments);
        }
        let mark = self.continue_final_message.then(|| self.mark_end()).transpose()?;
        let tokenizer = &state.checkpoint.tokenizer;
        let plain = state.options.plain_messages.then(|| PlainText::mark(&mut self.messages, tokenizer)).transpose()?;
        let tools = self.tools.format(format.tools)?;
        let shown = tools.map(|_| self.tools.shown());
        let tells_reasoning = format.reasoning && state.grammars.knows_reasoning();
        if self.structured.is_some() && !tells_reasoning {
            // The structure covers the whole text: no reasoning may come before it.
            let asked = self.template_kwargs.insert("enable_thinking".into(), false.into());
            if format.reasoning && asked == Some(true.into()) {
                let message = "enable_thinking: this model cannot reason before structured output";
                return Err(ApiError::invalid("chat_template_kwargs", message).with_code("unsupported_parameter"));
            }
        }
        let messages: Vec<Value> = self.messages.iter().map(Message::to_template).collect();
        let mut prompt = template
            .render(&messages, shown, self.add_generation_prompt, &self.template_kwargs)
            .map_err(|e| ApiError::invalid(names.messages, e.to_string()))?;
        if let Some(mark) = mark {
            let Some(end) = prompt.rfind(&mark) else {
                let message = "the last message cannot be continued: the chat template does not show its text";
                return Err(ApiError::invalid(names.messages, message));
            };
            prompt.truncate(end);
        }
        let mut reasoning = if format.reasoning { ReasoningStart::after(&prompt) } else { ReasoningStart::Never };
        let thinking = match format.reasoning && reasoning.may_follow(&prompt, self.continue_final_message) {
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
            let Tools { prefix, definitions, max_calls, .. } = &self.tools;
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
        let prompt = match plain {
            Some(plain) => plain.split(&prompt),
            None => vec![prompt],
        };
        Ok(Rendered { prompt, parsers, structured: self.structured, thinking })
    }

    /// Sets the template's arguments for the effort. Returns the name of its field if it has no effect on this model.
    pub fn set_effort(&mut self, state: &AppState) -> Result<Option<&'static str>, ApiError> {
        let (Some(effort), Some(template)) = (self.effort, &state.checkpoint.template) else { return Ok(None) };
        let name = self.names.effort;
        let refused = |e| ApiError::invalid(name, format!("{name} {e}")).with_code("unsupported_parameter");
        let honoured = template.set_effort(effort.name(), &mut self.template_kwargs).map_err(refused)?;
        Ok((!honoured).then_some(name))
    }

    /// Constraints on the reasoning before the output, if any have to be enforced.
    fn thinking(
        &self,
        start: ReasoningStart,
        call_ends_it: bool,
        state: &AppState,
    ) -> Result<Option<ReasoningLimits>, ApiError> {
        if self.tools.forced() || (self.structured.is_none() && self.thinking_budget.is_none()) {
            return Ok(None);
        }
        if self.thinking_budget.is_some() {
            self.check_budget(state)?;
        }
        let thinking = ReasoningLimits { start, call_ends_it, budget: self.thinking_budget };
        Ok(state.grammars.knows_reasoning().then_some(thinking))
    }

    /// Checks that a maximum number of reasoning tokens can be enforced.
    fn check_budget(&self, state: &AppState) -> Result<(), ApiError> {
        let masks = !state.engine.limits().unsupported.contains(&"structured_outputs");
        if masks && state.grammars.knows_reasoning() {
            return Ok(());
        }
        let name = self.names.thinking_budget;
        let message = format!("{name} is not implemented for this model");
        Err(ApiError::invalid(name, message).with_code("unsupported_parameter"))
    }

    /// Only DeepSeek-V4's prompts have reminders.
    fn check_roles(&self, format: OutputFormat) -> Result<(), ApiError> {
        if format.tools == Some(ToolFormat::Dsml) {
            return Ok(());
        }
        match self.messages.iter().position(|message| message.role == Role::LatestReminder) {
            None => Ok(()),
            Some(i) => {
                let message = format!("messages[{i}].role \"latest_reminder\" is unknown to this model");
                Err(ApiError::invalid("messages", message))
            }
        }
    }

    /// Appends a mark to the text of the last message, where the prompt is to end: what templates write behind the text
    /// may look like the text. The mark is random, so that no message holds it.
    fn mark_end(&mut self) -> Result<String, ApiError> {
        let mark = format!("\u{F8FF}{:016x}\u{F8FF}", random_u64()?);
        match self.messages.last_mut().map(|message| &mut message.text).filter(|text| !text.trim().is_empty()) {
            Some(text) => {
                text.truncate(text.trim_end().len());
                text.push_str(&mark);
                Ok(mark)
            }
            None => {
                let message = "there is nothing to continue: the last message has no text";
                Err(ApiError::invalid(self.names.messages, message))
            }
        }
    }
}

/// A strict function asks for what no grammar can express.
fn not_enforced(reason: String) -> ApiError {
    ApiError::invalid("tools", format!("tools: a function is strict, but {reason}")).with_code("unsupported_parameter")
}

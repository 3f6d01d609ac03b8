//! Renders a conversation into a prompt, and sets up the constraints and parsers of its outputs.

use super::body::RequestContext;
use super::conversation::Conversation;
use super::images::ImageFiles;
use super::message::Message;
use super::model_state::ModelState;
use super::plain_text::PlainText;
use super::structured::Structured;
use super::system;
use super::tools::Tools;
use crate::error::ApiError;
use crate::ids::random_u64;
use crate::text_service::CancelCheck;
use pegainfer_text::parser::{
    OutputFormat, OutputParser, ParserOptions, ReasoningStart, ToolFormat, forced_grammar, grammar_or,
};
use pegainfer_text::{ChatTemplate, GrammarSource, ReasoningLimits, Tokenizer};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// Options for rendering and tokenizing a conversation.
#[derive(Debug, Clone, Copy)]
pub struct PromptOptions {
    /// Number of outputs.
    pub n: usize,
    /// True to run the tokenizer's post-processor (BOS) over the prompt.
    pub add_special_tokens: bool,
    /// True if a prompt that cannot fit the context is refused before it is tokenized.
    pub is_bounded: bool,
}

/// Number of tokens at the end of a rendered prompt that show whether reasoning or a call has begun.
const SHOWN_TOKENS: usize = 64;

/// A rendered conversation.
pub struct Rendered {
    /// The prompt, or the rest of it after the token ids that the client sent, in segments that are tokenized
    /// separately; most prompts have one.
    pub prompt: Vec<String>,
    /// Output parser of each choice.
    pub parsers: Vec<OutputParser>,
    /// Structure of the output.
    pub structured: Option<Structured>,
    /// Constraints on the reasoning before the output.
    pub thinking: Option<ReasoningLimits>,
}

/// A rendered and tokenized conversation.
pub struct EncodedPrompt {
    /// Constraints and parsers of the outputs.
    pub rendered: Rendered,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// The files of its images.
    pub images: ImageFiles,
}

impl Conversation {
    /// Renders the prompt and tokenizes it, off the async threads. Call `fit` first.
    pub async fn encode(
        mut self,
        state: &ModelState,
        context: &RequestContext,
        options: PromptOptions,
    ) -> Result<EncodedPrompt, ApiError> {
        self.images.fetch(state, context).await?;
        let work_state = state.clone();
        let work = move |tokenizer: &Arc<Tokenizer>, cancel: &CancelCheck<'_>| {
            let mut ids = self.rendered.take().unwrap_or_default();
            let sources = std::mem::take(&mut self.images);
            let mut rendered = self.render(&work_state, options.n, &ids)?;
            rendered.structured = rendered.structured.map(Structured::into_lark).transpose()?;
            if cancel.is_cancelled() {
                // Nobody waits for the result.
                return Ok(EncodedPrompt { rendered, ids: Vec::new(), images: ImageFiles::default() });
            }
            let segments = &rendered.prompt;
            if options.is_bounded {
                work_state.check_length(segments.iter().map(String::len).sum(), "messages")?;
            }
            // The tokenizer's special tokens would be added to each segment.
            let add_special_tokens = options.add_special_tokens && segments.len() == 1 && ids.is_empty();
            for segment in segments {
                let segment = tokenizer.encode(segment, add_special_tokens);
                ids.append(&mut segment.map_err(|error| ApiError::invalid("messages", error.to_string()))?);
            }
            let mut images = ImageFiles::default();
            if let Some(reader) = &work_state.model.text.images {
                images = sources.open(reader, &work_state.options.limits.images, cancel)?;
                ids = images.expand(ids, reader)?;
            }
            Ok(EncodedPrompt { rendered, ids, images })
        };
        state.tokenize(&context.hold, work).await?
    }

    /// Renders the prompt and builds the parsers of its `n` outputs. If the client sent token ids, only what they lack
    /// is rendered: the beginning of a forced call, and the end of reasoning before it.
    fn render(mut self, state: &ModelState, n: usize, sent: &[u32]) -> Result<Rendered, ApiError> {
        let Some(template) = &state.model.text.checkpoint.template else {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        };
        let format = template.output_format();
        self.check_roles(format)?;
        if self.structured.is_some() && !(format.reasoning && state.model.text.grammars.has_reasoning_tags()) {
            self.disable_reasoning(format)?;
        }
        let tools = self.tools.format(format.tools)?;
        let call = tools.map_or_else(String::new, |format| self.tools.prefix.text(format));
        let (prompt, plain) = match sent {
            [] => self.fill(template, tools.is_some(), state)?,
            _ => (end_of(sent, call.len(), state), None),
        };
        let mut rest = String::new();
        let mut reasoning = if format.reasoning { ReasoningStart::after(&prompt) } else { ReasoningStart::Never };
        let thinking = match format.reasoning && reasoning.may_follow(&prompt, self.continue_final_message) {
            true => self.thinking(reasoning, tools == Some(ToolFormat::Qwen3Coder), state)?,
            false => None,
        };
        // Reasoning may not precede a structure without reasoning, nor a forced call.
        if (self.structured.is_some() && thinking.is_none()) || (tools.is_some() && self.tools.forced()) {
            rest += reasoning.close(format.tools);
            reasoning = ReasoningStart::Never;
        }
        if let Some(tools) = tools {
            self.constrain_calls(tools)?;
        }
        if sent.is_empty() || !prompt.ends_with(&call) {
            rest += &call;
        }
        let prompt = if sent.is_empty() { prompt + &rest } else { rest };
        let parsers = (0..n).map(|_| self.parser(reasoning, tools)).collect::<Result<_, _>>()?;
        let prompt = match plain {
            Some(plain) => plain.segments(prompt),
            None => vec![prompt],
        };
        Ok(Rendered { prompt, parsers, structured: self.structured, thinking })
    }

    /// The rendered template, and the control tokens in messages that are split off it.
    fn fill(
        &mut self,
        template: &ChatTemplate,
        shows_tools: bool,
        state: &ModelState,
    ) -> Result<(String, Option<PlainText>), ApiError> {
        system::arrange(&mut self.messages, template);
        if template.output_format().tools != Some(ToolFormat::Hermes) {
            // Only that format writes arguments unchanged; the others need objects.
            self.messages.iter_mut().for_each(Message::complete_arguments);
        }
        // The end of the prompt, if the last message is continued.
        let mark = self.continue_final_message.then(|| self.mark_end()).transpose()?;
        let mut plain = PlainText::new()?;
        if state.options.plain_messages {
            plain.mark_messages(&mut self.messages, &state.model.text.checkpoint.tokenizer);
        }
        let refused = |message: String| ApiError::invalid(self.names.messages, message);
        let mut messages: Vec<Value> = self.messages.iter().map(Message::to_template).collect();
        let mut tools = shows_tools.then(|| Cow::Borrowed(self.tools.shown()));
        if let Some(reader) = &state.model.text.images {
            let tools = tools.iter_mut().flat_map(|tools| tools.to_mut());
            messages.iter_mut().chain(tools).for_each(|value| plain.mark_value(value, reader.markers()));
        }
        let mut prompt = template
            .render(&messages, tools.as_deref(), self.add_generation_prompt, &self.template_kwargs)
            .map_err(|e| refused(e.to_string()))?;
        if let Some(mark) = mark {
            let message = "the last message cannot be continued: the chat template does not show its text";
            let end = prompt.rfind(&mark).ok_or_else(|| refused(message.into()))?;
            prompt.truncate(end);
        }
        Ok((prompt, Some(plain)))
    }

    /// Disables the reasoning, because the structure covers the whole text.
    fn disable_reasoning(&mut self, format: OutputFormat) -> Result<(), ApiError> {
        let asked = self.template_kwargs.insert("enable_thinking".into(), false.into());
        if format.reasoning && asked == Some(true.into()) {
            let message = "enable_thinking: this model cannot reason before structured output";
            return Err(ApiError::invalid("chat_template_kwargs", message).with_code("unsupported_parameter"));
        }
        Ok(())
    }

    /// Extends the output's structure to calls. Forced calls replace the structure; other calls are an alternative to
    /// it.
    fn constrain_calls(&mut self, format: ToolFormat) -> Result<(), ApiError> {
        let Tools { prefix, definitions, max_calls, .. } = &self.tools;
        if let Some(Structured { field, source }) = &mut self.structured {
            let either = grammar_or(source, format, definitions, *max_calls).map_err(not_enforced)?;
            let Some(either) = either else {
                let message = format!("{field}.grammar cannot be combined with tools: send \"tool_choice\": \"none\"");
                return Err(ApiError::invalid(field, message).with_code("unsupported_parameter"));
            };
            *source = GrammarSource::Lark(either);
        }
        if self.tools.forced() {
            let source = forced_grammar(format, prefix, definitions, *max_calls).map_err(not_enforced)?;
            let source = source.map(GrammarSource::Lark);
            self.structured = source.map(|source| Structured { field: "tools", source });
        }
        Ok(())
    }

    fn parser(&self, reasoning: ReasoningStart, tools: Option<ToolFormat>) -> Result<OutputParser, ApiError> {
        Ok(OutputParser::new(ParserOptions {
            reasoning,
            include_reasoning: self.include_reasoning,
            tools,
            prefix: self.tools.prefix.clone(),
            definitions: self.tools.definitions.clone(),
            max_calls: self.tools.max_calls,
            id_seed: random_u64()?,
        }))
    }

    /// Constraints on the reasoning before the output, if any have to be enforced.
    fn thinking(
        &self,
        start: ReasoningStart,
        call_ends_it: bool,
        state: &ModelState,
    ) -> Result<Option<ReasoningLimits>, ApiError> {
        if self.tools.forced() || (self.structured.is_none() && self.thinking_budget.is_none()) {
            return Ok(None);
        }
        if self.thinking_budget.is_some() {
            self.check_budget(state)?;
        }
        let thinking = ReasoningLimits { start, call_ends_it, budget: self.thinking_budget };
        Ok(state.model.text.grammars.has_reasoning_tags().then_some(thinking))
    }

    /// Checks that a maximum number of reasoning tokens can be enforced.
    fn check_budget(&self, state: &ModelState) -> Result<(), ApiError> {
        let masks = !state.model.engine.limits().unsupported.contains(&"structured_outputs");
        if masks && state.model.text.grammars.has_reasoning_tags() {
            return Ok(());
        }
        let name = self.names.thinking_budget;
        let message = format!("{name} is not implemented for this model");
        Err(ApiError::invalid(name, message).with_code("unsupported_parameter"))
    }

    /// Appends a mark to the text of the last message, where the prompt is to end: the template's text after the
    /// message may look like the message. The mark is random, so that no message contains it.
    fn mark_end(&mut self) -> Result<String, ApiError> {
        let mark = format!("\u{F8FF}{:016x}\u{F8FF}", random_u64()?);
        let last = self.messages.last_mut().and_then(|message| message.texts_mut().next_back());
        match last.filter(|text| !text.trim().is_empty()) {
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

/// Text at the end of a prompt of token ids: enough to tell whether it begins reasoning, or a call of `call` bytes.
fn end_of(prompt: &[u32], call: usize, state: &ModelState) -> String {
    let end = prompt.len().saturating_sub(SHOWN_TOKENS + call);
    state.model.text.checkpoint.tokenizer.decode_all(&prompt[end..])
}

/// The error for a strict function that no grammar can enforce.
fn not_enforced(reason: String) -> ApiError {
    ApiError::invalid("tools", format!("tools: a function is strict, but {reason}")).with_code("unsupported_parameter")
}

//! Messages, tools and template arguments of a chat.

use super::images::{ImagePixels, Sources};
use super::message::{Message, Role};
use super::model_state::ModelState;
use super::schema::conversation::Effort;
use super::structured::Structured;
use super::tools::Tools;
use crate::error::ApiError;
use pegainfer_text::parser::{OutputFormat, ToolFormat};
use serde_json::{Map, Value};

/// Template arguments that `chat_template_kwargs` must not replace.
const RESERVED_KWARGS: [&str; 5] = ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"];

/// Names of a chat's fields in one API, for errors.
#[derive(Debug)]
pub struct FieldNames {
    /// The messages.
    pub messages: &'static str,
    /// Reasoning effort.
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

/// Input of the chat template, and the output's structure.
#[derive(Debug, Default)]
pub struct Conversation {
    /// Names of the fields in the API that was called.
    pub names: &'static FieldNames,
    /// The messages, at least one.
    pub messages: Vec<Message>,
    /// The images of the messages, once they are taken.
    pub images: Sources,
    /// Areas of images that the request asks for.
    pub image_pixels: ImagePixels,
    /// Token ids of the prompt, if somebody else rendered the messages.
    pub rendered: Option<Vec<u32>>,
    /// Functions that the model may or has to call.
    pub tools: Tools,
    /// Structure of the output. A forced call overrides it.
    pub structured: Option<Structured>,
    /// Arguments of the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Reasoning effort.
    pub effort: Option<Effort>,
    /// Maximum number of reasoning tokens.
    pub thinking_budget: Option<usize>,
    /// True if the output includes the reasoning.
    pub include_reasoning: bool,
    /// True if the prompt ends with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// True if the output continues the last message.
    pub continue_final_message: bool,
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
            // The output is a call, which its own schema constrains.
            self.structured = None;
        }
        Ok(self)
    }

    /// Fits the conversation to the model: sets the template's arguments for the effort, and takes the images or what
    /// models of text read instead. Returns the names of fields that this model ignores.
    pub fn fit(&mut self, state: &ModelState) -> Result<Vec<String>, ApiError> {
        let mut ignored: Vec<String> = self.set_effort(state)?.map(str::to_owned).into_iter().collect();
        if state.model.text.images.is_none() {
            if self.image_pixels != ImagePixels::default() {
                let message = "mm_processor_kwargs is not implemented by this endpoint: only an empty value is \
                               accepted, got an object";
                return Err(ApiError::invalid("mm_processor_kwargs", message).with_code("unsupported_parameter"));
            }
            self.messages.iter_mut().try_for_each(|message| message.leave_out_images(&mut ignored))?;
            return Ok(ignored);
        }
        let max_images = state.options.limits.images.max_images.get();
        self.images = Sources::take(&mut self.messages, self.names.messages, (max_images, self.image_pixels))?;
        if self.rendered.is_some() && !self.images.images.is_empty() {
            let message = "tokens cannot be combined with images: leave out tokens";
            return Err(ApiError::invalid("tokens", message).with_code("unsupported_parameter"));
        }
        if let Some(ids) = &self.rendered {
            state.refuse_image_tokens(ids, "tokens")?;
        }
        Ok(ignored)
    }

    /// Sets the template's arguments for the effort. Returns the name of its field if this model ignores it.
    fn set_effort(&mut self, state: &ModelState) -> Result<Option<&'static str>, ApiError> {
        let (Some(effort), Some(template)) = (self.effort, &state.model.text.checkpoint.template) else {
            return Ok(None);
        };
        let name = self.names.effort;
        let refused = |e| ApiError::invalid(name, format!("{name} {e}")).with_code("unsupported_parameter");
        let honoured = template.set_effort(effort.name(), &mut self.template_kwargs).map_err(refused)?;
        Ok((!honoured).then_some(name))
    }

    /// Only DeepSeek-V4's prompts have reminders.
    pub(super) fn check_roles(&self, format: OutputFormat) -> Result<(), ApiError> {
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
}

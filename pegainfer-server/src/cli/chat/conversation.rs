//! The messages of a chat, and the request for the next one.

use clap::Args;
use serde::Serialize;
use std::num::NonZeroUsize;

/// Generation parameters, sent as request fields and checked by the API. Defaults come from the checkpoint.
#[derive(Debug, Clone, Default, Args, Serialize)]
pub struct Generation {
    /// Maximum number of tokens of an answer, reasoning included [default: what is left of the context]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<NonZeroUsize>,
    /// Sampling temperature; 0 always takes the most likely token [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Nucleus sampling: keep the most likely tokens up to this probability mass [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// The same seed gives the same answers [default: random]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Reasoning before the answer: none, minimal, low, medium or high [default: the model's]
    #[arg(long, value_name = "EFFORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_effort: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

#[derive(Serialize)]
struct Request<'a> {
    messages: Vec<&'a Message>,
    stream: bool,
    #[serde(flatten)]
    generation: &'a Generation,
}

/// The messages so far.
pub(super) struct Conversation {
    system: Option<Message>,
    messages: Vec<Message>,
    generation: Generation,
}

impl Conversation {
    pub(super) fn new(system: Option<String>, generation: Generation) -> Self {
        let mut conversation = Self { system: None, messages: Vec::new(), generation };
        conversation.set_system(system.unwrap_or_default());
        conversation
    }

    /// Restarts the conversation with another system message; an empty one removes it.
    pub(super) fn set_system(&mut self, text: String) {
        self.reset();
        self.system = Some(Message { role: "system", content: text }).filter(|message| !message.content.is_empty());
    }

    /// Removes everything except the system message.
    pub(super) fn reset(&mut self) {
        self.messages.clear();
    }

    pub(super) fn ask(&mut self, text: &str) {
        self.messages.push(Message { role: "user", content: text.to_owned() });
    }

    /// Appends an answer. A stopped answer is kept as far as it came, so that the user can refer to it.
    pub(super) fn answered(&mut self, text: String) {
        self.messages.push(Message { role: "assistant", content: text });
    }

    /// Removes a question without an answer.
    pub(super) fn take_back(&mut self) {
        self.messages.pop();
    }

    /// Body of a streamed chat completion.
    pub(super) fn request(&self) -> serde_json::Result<Vec<u8>> {
        let messages = self.system.iter().chain(&self.messages).collect();
        serde_json::to_vec(&Request { messages, stream: true, generation: &self.generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn body(conversation: &Conversation) -> Value {
        serde_json::from_slice(&conversation.request().unwrap()).unwrap()
    }

    #[test]
    fn a_request_has_the_system_message_and_the_history() {
        let generation = Generation { temperature: Some(0.5), ..Generation::default() };
        let mut conversation = Conversation::new(Some("Be brief.".into()), generation);
        conversation.ask("a");
        conversation.answered("b".into());
        conversation.ask("c");
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let messages =
            [message("system", "Be brief."), message("user", "a"), message("assistant", "b"), message("user", "c")];
        assert_eq!(body(&conversation), json!({"messages": messages, "stream": true, "temperature": 0.5}));
        conversation.take_back();
        conversation.reset();
        conversation.ask("d");
        assert_eq!(body(&conversation)["messages"], json!([message("system", "Be brief."), message("user", "d")]));
        conversation.set_system(String::new());
        conversation.ask("e");
        assert_eq!(body(&conversation)["messages"], json!([message("user", "e")]));
    }
}

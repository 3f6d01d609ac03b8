//! The messages of a chat, and the request for the next one.

use super::generation::Generation;
use super::settings::{self, Settings};
use serde::Serialize;
use serde_json::{Value, json};
use std::num::NonZeroUsize;

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

#[derive(Serialize)]
struct Request<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    messages: Vec<&'a Message>,
    stream: bool,
    stream_options: Value,
    #[serde(flatten)]
    settings: &'a Settings,
}

/// The messages so far.
#[derive(Clone)]
pub(super) struct Conversation {
    /// Name of the model that answers; `None` for the first one.
    pub(super) model: Option<String>,
    system: Option<Message>,
    messages: Vec<Message>,
    /// Fields of the requests, changed by `/set`.
    pub(super) settings: Settings,
    /// True if the user knows that the oldest turns are no longer sent.
    pub(super) is_told_full: bool,
}

impl Conversation {
    pub(super) fn new(system: Option<String>, generation: &Generation) -> Self {
        let settings = settings::from_flags(generation);
        let mut conversation = Self { model: None, system: None, messages: Vec::new(), settings, is_told_full: false };
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
        self.is_told_full = false;
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

    /// Removes the oldest question and its answer. Returns false if there is only one question.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let Some(next) = self.messages.iter().skip(1).position(|message| message.role == "user") else { return false };
        self.messages.drain(..=next);
        true
    }

    /// The set limit of an answer's tokens.
    pub(super) fn max_tokens(&self) -> Option<NonZeroUsize> {
        settings::max_tokens(&self.settings)
    }

    fn all(&self) -> Vec<&Message> {
        self.system.iter().chain(&self.messages).collect()
    }

    /// Body of a streamed chat completion.
    pub(super) fn request(&self) -> serde_json::Result<Vec<u8>> {
        let stream_options = json!({"include_usage": true});
        let (model, messages) = (self.model.as_deref(), self.all());
        serde_json::to_vec(&Request { model, messages, stream: true, stream_options, settings: &self.settings })
    }

    /// Body of a request that counts the tokens of the conversation.
    pub(super) fn to_tokenize(&self) -> serde_json::Result<Vec<u8>> {
        let effort =
            self.settings.get("reasoning_effort").map(|effort| ("reasoning_effort".to_owned(), effort.clone()));
        let mut body: Settings = effort.into_iter().collect();
        body.insert("messages".to_owned(), json!(self.all()));
        body.extend(self.model.as_ref().map(|model| ("model".to_owned(), json!(model))));
        serde_json::to_vec(&body)
    }

    /// The conversation as a file of `/save`: the messages of a chat request, which the web UI imports.
    pub(super) fn to_file(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(&json!({"messages": self.all()}))? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(conversation: &Conversation) -> Value {
        serde_json::from_slice(&conversation.request().unwrap()).unwrap()
    }

    #[test]
    fn a_request_has_the_system_message_and_the_history() {
        let generation = Generation { temperature: Some(0.5), ..Generation::default() };
        let mut conversation = Conversation::new(Some("Be brief.".into()), &generation);
        conversation.ask("a");
        conversation.answered("b".into());
        conversation.ask("c");
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let messages =
            [message("system", "Be brief."), message("user", "a"), message("assistant", "b"), message("user", "c")];
        let usage = json!({"include_usage": true});
        assert_eq!(
            body(&conversation),
            json!({"messages": messages, "stream": true, "stream_options": usage, "temperature": 0.5})
        );
        conversation.take_back();
        conversation.reset();
        conversation.ask("d");
        assert_eq!(body(&conversation)["messages"], json!([message("system", "Be brief."), message("user", "d")]));
        conversation.set_system(String::new());
        conversation.model = Some("small".to_owned());
        conversation.ask("e");
        let tokenized: Value = serde_json::from_slice(&conversation.to_tokenize().unwrap()).unwrap();
        assert_eq!((&body(&conversation)["model"], &tokenized["model"]), (&json!("small"), &json!("small")));
        assert_eq!(body(&conversation)["messages"], json!([message("user", "e")]));
    }

    #[test]
    fn the_oldest_turn_goes_and_the_last_question_stays() {
        let mut conversation = Conversation::new(Some("s".into()), &Generation::default());
        for turn in ["1", "2"] {
            conversation.ask(&format!("question {turn}"));
            conversation.answered(format!("answer {turn}"));
        }
        conversation.ask("question 3");
        let contents = |conversation: &Conversation| -> Vec<String> {
            conversation.all().into_iter().map(|message| message.content.clone()).collect()
        };
        assert!(conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["s", "question 2", "answer 2", "question 3"]);
        assert!(conversation.drop_oldest() && !conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["s", "question 3"]);
    }
}

//! The messages of a chat, and the request for the next one.

use super::attachments::Attachment;
use super::generation::Generation;
use super::settings::{self, Settings};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Message {
    role: &'static str,
    content: Content,
}

/// The content of a message: a text, or parts if there are images.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    Text { text: String },
    ImageUrl { image_url: ImageUrl },
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ImageUrl {
    /// A data URL of many megabytes, which copies of the conversation share.
    #[serde(serialize_with = "serialize_text")]
    url: Arc<str>,
}

fn serialize_text<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

impl Content {
    /// A text with images after it, as the web UI orders them.
    fn new(text: String, images: Vec<Attachment>) -> Self {
        if images.is_empty() {
            return Self::Text(text);
        }
        let images = images.into_iter().map(|image| Part::ImageUrl { image_url: ImageUrl { url: image.url } });
        Self::Parts(std::iter::once(Part::Text { text }).chain(images).collect())
    }

    /// Number of images.
    fn images(&self) -> usize {
        match self {
            Self::Text(_) => 0,
            Self::Parts(parts) => parts.iter().filter(|part| matches!(part, Part::ImageUrl { .. })).count(),
        }
    }
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
        self.system = (!text.is_empty()).then_some(Message { role: "system", content: Content::Text(text) });
    }

    /// Removes everything except the system message.
    pub(super) fn reset(&mut self) {
        self.messages.clear();
        self.is_told_full = false;
    }

    /// Appends a question with images.
    pub(super) fn ask(&mut self, text: &str, images: Vec<Attachment>) {
        self.messages.push(Message { role: "user", content: Content::new(text.to_owned(), images) });
    }

    /// Appends an answer. A stopped answer is kept as far as it came, so that the user can refer to it.
    pub(super) fn answered(&mut self, text: String) {
        self.messages.push(Message { role: "assistant", content: Content::Text(text) });
    }

    /// Removes a question without an answer. Returns the number of its images.
    pub(super) fn take_back(&mut self) -> usize {
        self.messages.pop().map_or(0, |message| message.content.images())
    }

    /// Number of images of all messages.
    pub(super) fn images(&self) -> usize {
        self.messages.iter().map(|message| message.content.images()).sum()
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
        conversation.ask("a", Vec::new());
        conversation.answered("b".into());
        conversation.ask("c", Vec::new());
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
        conversation.ask("d", Vec::new());
        assert_eq!(body(&conversation)["messages"], json!([message("system", "Be brief."), message("user", "d")]));
        conversation.set_system(String::new());
        conversation.model = Some("small".to_owned());
        conversation.ask("e", Vec::new());
        let tokenized: Value = serde_json::from_slice(&conversation.to_tokenize().unwrap()).unwrap();
        assert_eq!((&body(&conversation)["model"], &tokenized["model"]), (&json!("small"), &json!("small")));
        assert_eq!(body(&conversation)["messages"], json!([message("user", "e")]));
    }

    #[test]
    fn images_follow_the_text_of_their_message() {
        let file = |name: &str| {
            let dir =
                std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures/sources");
            Attachment::read(&dir.join(name), &crate::limits::Limits::default().images).unwrap()
        };
        let images = vec![file("small.png"), file("photo.jpg")];
        let part = |image: &Attachment| json!({"type": "image_url", "image_url": {"url": *image.url}});
        let content = json!([{"type": "text", "text": "a"}, part(&images[0]), part(&images[1])]);
        let mut conversation = Conversation::new(None, &Generation::default());
        conversation.ask("a", images);
        conversation.answered("b".into());
        conversation.ask("c", vec![file("small.png")]);
        assert_eq!((conversation.images(), conversation.take_back(), conversation.images()), (3, 1, 2));
        let messages = json!([{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]);
        assert_eq!(body(&conversation)["messages"], messages);
        let saved: Value = serde_json::from_str(&conversation.to_file().unwrap()).unwrap();
        assert_eq!(saved, json!({"messages": messages}));
    }

    #[test]
    fn the_oldest_turn_goes_and_the_last_question_stays() {
        let mut conversation = Conversation::new(Some("s".into()), &Generation::default());
        for turn in ["1", "2"] {
            conversation.ask(&format!("question {turn}"), Vec::new());
            conversation.answered(format!("answer {turn}"));
        }
        conversation.ask("question 3", Vec::new());
        let contents = |conversation: &Conversation| -> Vec<Value> {
            conversation.all().into_iter().map(|message| json!(message.content)).collect()
        };
        assert!(conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["s", "question 2", "answer 2", "question 3"]);
        assert!(conversation.drop_oldest() && !conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["s", "question 3"]);
    }
}

//! Moves system messages to where chat templates show them.

use super::message::{Message, Role};
use pegainfer_text::ChatTemplate;

/// Joins the system messages at the beginning into one. Later ones stay in place. If the template does not show them
/// there, they become text of the preceding user message, or a new user message.
pub fn arrange(messages: &mut Vec<Message>, template: &ChatTemplate) {
    let leading = messages.iter().take_while(|message| message.role == Role::System).count();
    if leading > 1 {
        let texts: Vec<String> = messages.drain(..leading).map(|message| message.text).collect();
        messages.insert(0, Message::new(Role::System, texts.join("\n\n")));
    }
    let has_later = messages.iter().skip(1).any(|message| message.role == Role::System);
    if has_later && !template.shows_later_system_messages() {
        let all = std::mem::take(messages);
        all.into_iter().enumerate().for_each(|(i, message)| match (i, message.role) {
            (1.., Role::System) => say_as_user(messages, message.text),
            _ => messages.push(message),
        });
    }
}

/// Adds instructions within a conversation to the preceding user message, if there is one.
pub fn say_as_user(messages: &mut Vec<Message>, text: String) {
    match messages.last_mut().filter(|last| last.role == Role::User) {
        Some(last) => last.append_line(&text),
        None => messages.push(Message::new(Role::User, text)),
    }
}

//! Writes the parameters of one call as a JSON object.

use super::json_text::escaped;
use super::output::Output;
use serde_json::Value;

/// The object so far.
#[derive(Debug, Default)]
pub struct Arguments {
    keys: Vec<String>,
}

impl Arguments {
    /// Whether there are no members yet.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether the object has this key.
    pub fn contains(&self, key: &str) -> bool {
        self.keys.iter().any(|other| other == key)
    }

    /// Writes the key of the next member; false if the object has it: the first value stays, since it may have been sent.
    fn key(&mut self, key: &str, out: &mut Output) -> bool {
        if self.contains(key) {
            return false;
        }
        let separator = if self.keys.is_empty() { "{" } else { ", " };
        out.tool_arguments(&format!("{separator}{}: ", Value::from(key)));
        self.keys.push(key.to_owned());
        true
    }

    /// Begins a string that is written in pieces; false if the object has the key.
    pub fn open_text(&mut self, key: &str, out: &mut Output) -> bool {
        let new = self.key(key, out);
        if new {
            out.tool_arguments("\"");
        }
        new
    }

    /// Writes more of a string.
    pub fn text(&self, text: &str, out: &mut Output) {
        out.tool_arguments(&escaped(text));
    }

    /// Ends a string.
    pub fn close_text(&self, out: &mut Output) {
        out.tool_arguments("\"");
    }

    /// Writes a member, unless the object has its key.
    pub fn member(&mut self, key: &str, json: &str, out: &mut Output) {
        if self.key(key, out) {
            out.tool_arguments(json);
        }
    }

    /// Ends the object and the call.
    pub fn end(&mut self, complete: bool, out: &mut Output) {
        out.tool_arguments(if self.keys.is_empty() { "{}" } else { "}" });
        self.keys.clear();
        out.tool_end(complete);
    }
}

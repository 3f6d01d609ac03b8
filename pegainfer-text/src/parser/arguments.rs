//! Writes the arguments of one call: its parameters as a JSON object, or the model's own object.

use super::cursor::Cursor;
use super::json_reader::{JsonReader, Read};
use super::json_text::escaped;
use super::output::EventCollector;
use serde_json::Value;

/// The object so far.
#[derive(Debug, Default)]
pub struct Arguments {
    keys: Vec<String>,
}

impl Arguments {
    /// True if there are no members yet.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// True if the object has this key.
    pub fn contains(&self, key: &str) -> bool {
        self.keys.iter().any(|other| other == key)
    }

    /// Writes the key of the next member. Returns false if the object has it already: the first value stays, since it
    /// may have been sent.
    fn key(&mut self, key: &str, out: &mut EventCollector) -> bool {
        if self.contains(key) {
            return false;
        }
        let separator = if self.keys.is_empty() { "{" } else { ", " };
        out.tool_arguments(&format!("{separator}{}: ", Value::from(key)));
        self.keys.push(key.to_owned());
        true
    }

    /// Begins a string that is written in deltas; false if the object has the key already.
    pub fn open_text(&mut self, key: &str, out: &mut EventCollector) -> bool {
        let new = self.key(key, out);
        if new {
            out.tool_arguments("\"");
        }
        new
    }

    /// Writes more of a string.
    pub fn text(&self, text: &str, out: &mut EventCollector) {
        out.tool_arguments(&escaped(text));
    }

    /// Ends a string.
    pub fn close_text(&self, out: &mut EventCollector) {
        out.tool_arguments("\"");
    }

    /// Writes a member, unless the object has its key already.
    pub fn member(&mut self, key: &str, json: &str, out: &mut EventCollector) {
        if self.key(key, out) {
            out.tool_arguments(json);
        }
    }

    /// Ends the object and the call.
    pub fn end(&mut self, complete: bool, out: &mut EventCollector) {
        out.tool_arguments(if self.keys.is_empty() { "{}" } else { "}" });
        self.keys.clear();
        out.tool_end(complete);
    }
}

/// Streams a model's own object as the arguments of the open call. The call ends with the object.
pub fn stream_object(reader: &mut JsonReader, cursor: &mut Cursor, out: &mut EventCollector) -> Read {
    let mut text = String::new();
    let read = reader.read(cursor, &mut text);
    cursor.take();
    if read == Read::CutShort {
        reader.close(&mut text);
    }
    out.tool_arguments(&text);
    if read != Read::More {
        out.tool_end(true);
    }
    read
}

/// Ends an object, and its call, at the end of the output.
pub fn cut_off_object(reader: &mut JsonReader, out: &mut EventCollector) {
    let mut text = String::new();
    reader.close(&mut text);
    out.tool_arguments(&text);
    out.tool_end(false);
}

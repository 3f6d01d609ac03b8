//! Words, and the definitions of the tools.

use pegainfer_core::rng;
use serde_json::{Value, json};

/// Number of words in a line.
const LINE: usize = 12;
/// Common words, which most tokenizers know as a whole.
const WORDS: [&str; 64] = [
    "the", "file", "line", "test", "code", "list", "name", "value", "read", "write", "open", "close", "first", "last",
    "next", "time", "data", "type", "user", "error", "call", "find", "set", "get", "new", "old", "key", "path", "root",
    "node", "tree", "page", "block", "table", "index", "size", "start", "end", "from", "with", "into", "over", "under",
    "before", "after", "return", "result", "check", "build", "run", "load", "save", "send", "state", "event", "group",
    "point", "order", "number", "string", "function", "class", "module", "server",
];
/// Tools: name, description and parameters.
const TOOLS: [(&str, &str, &[&str]); 6] = [
    ("read_file", "Reads lines of a file.", &["path", "first_line", "last_line"]),
    ("write_file", "Replaces the text of a file.", &["path", "text"]),
    ("edit_file", "Replaces one text in a file by another one.", &["path", "old_text", "new_text"]),
    ("search", "Finds lines that match a regular expression.", &["pattern", "path"]),
    ("list_files", "Lists the files of a directory.", &["path"]),
    ("run_command", "Runs a shell command and returns its output.", &["command", "timeout"]),
];

/// A system message of `count` words. The definitions of tools are part of it if they are text.
pub fn system(seed: u64, count: usize, has_text_tools: bool) -> Value {
    let mut text = format!("You are a coding agent. Your notes are {seed:016x}.\n");
    if has_text_tools {
        text += &format!("Tools, as JSON:\n{}\n", tools());
    }
    json!({"role": "system", "content": text + &words(seed, count)})
}

/// The definitions of the tools.
pub fn tools() -> Value {
    let parameter = |name: &&str| ((*name).to_owned(), json!({"type": "string", "description": format!("The {name}")}));
    let function = |(name, description, parameters): &(&str, &str, &[&str])| {
        let properties: Value = parameters.iter().map(parameter).collect();
        let schema = json!({"type": "object", "properties": properties, "required": [parameters[0]]});
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": schema}})
    };
    TOOLS.iter().map(function).collect()
}

/// Text of `count` words.
pub fn words(seed: u64, count: usize) -> String {
    let mut text = String::new();
    for i in 0..count {
        text += word(seed, i as u64);
        text.push(if i % LINE == LINE - 1 { '\n' } else { ' ' });
    }
    text
}

/// The word at a position of a text.
pub fn word(seed: u64, position: u64) -> &'static str {
    WORDS[rng::below(rng::bits(seed, position), WORDS.len() as u64) as usize]
}

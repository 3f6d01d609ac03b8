//! The configuration file: a TOML table with the long names of flags as keys.

use super::names::{known_flags, nearest};
use clap::Command;
use std::ffi::OsString;
use std::path::PathBuf;
use toml::{Table, Value};

/// A configuration file whose keys are known.
pub(super) struct ConfigFile {
    path: PathBuf,
    table: Table,
}

impl ConfigFile {
    /// Where a flag is set, and its values as they are written on a command line.
    pub(super) fn values(&self, long: &str) -> Option<(String, Vec<OsString>)> {
        let values = match self.table.get(long)? {
            Value::Array(values) => values.iter().map(text).collect(),
            value => vec![text(value)],
        };
        Some((format!("{}: {long}", self.path.display()), values))
    }
}

/// A value without the quotes of a string; a table is JSON.
fn text(value: &Value) -> OsString {
    match value {
        Value::String(text) => text.into(),
        // A whole number has no fraction on a command line.
        Value::Float(number) => number.to_string().into(),
        value => serde_json::json!(value).to_string().into(),
    }
}

/// Reads a file and checks its keys. One file may serve several commands, so that flags of all commands are known.
pub(super) fn read(path: PathBuf, root: &Command) -> Result<ConfigFile, String> {
    let shown = path.display();
    let text =
        std::fs::read_to_string(&path).map_err(|e| format!("the configuration file {shown} cannot be read: {e}"))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        format!("{shown}: line {line} is not valid TOML: {}", error.message().lines().collect::<Vec<_>>().join(", "))
    })?;
    let mut known = known_flags(root);
    known.remove("config");
    match table.keys().find(|key| !known.contains(*key)) {
        Some(key) => Err(match nearest(key, &known) {
            Some(name) => format!("{shown}: {key} is not a known setting; did you mean {name}?"),
            None => format!("{shown}: {key} is not a known setting; see the flags that --help lists"),
        }),
        None => Ok(ConfigFile { path, table }),
    }
}

//! The configuration file: a TOML table with the long names of flags as keys.

use super::added::Added;
use super::names::{is_setting, known_flags, nearest};
use clap::{Command, Parser};
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
        Some((format!("{}: {long}", self.path.display()), values(self.table.get(long)?)))
    }
}

/// The flags of a table that has only keys of the command `P`. `shown` names the table in errors.
pub fn parse_table<P: Parser>(table: &Table, shown: &str) -> Result<P, String> {
    let command = P::command();
    let mut added = Vec::new();
    for (key, value) in table {
        let arg = command.get_arguments().find(|arg| is_setting(arg) && arg.get_long() == Some(key));
        let Some(arg) = arg else {
            let known = known_flags(&command);
            let near = nearest(key, &known).map_or_else(String::new, |name| format!("; did you mean {name}?"));
            return Err(format!("{shown}: {key} is not a setting of a model{near}"));
        };
        added.push(Added::new(arg, key, format!("{shown}: {key}"), &values(value))?);
    }
    P::try_parse_from(added.iter().flat_map(|added| &added.args)).map_err(|error| {
        let sentence = added.iter().find_map(|added| added.explain(&error));
        sentence.unwrap_or_else(|| format!("{shown}: {}", error.to_string().trim_start_matches("error: ").trim()))
    })
}

/// A value, or the values of a list, as they are written on a command line.
fn values(value: &Value) -> Vec<OsString> {
    match value {
        Value::Array(values) => values.iter().map(text).collect(),
        value => vec![text(value)],
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
    if let Some((section, _)) = table.iter().find(|(key, value)| value.is_table() && !known.contains(*key)) {
        return Err(format!("{shown}: the file has no sections such as [{section}]: write each setting without one"));
    }
    match table.keys().find(|key| !known.contains(*key)) {
        Some(key) => Err(match nearest(key, &known) {
            Some(name) => format!("{shown}: {key} is not a known setting; did you mean {name}?"),
            None => format!("{shown}: {key} is not a known setting; see the flags that --help lists"),
        }),
        None => Ok(ConfigFile { path, table }),
    }
}

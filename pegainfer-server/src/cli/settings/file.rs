//! The configuration file: a TOML table with the long names of flags as keys.

use super::names::is_setting;
use clap::Command;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use toml::Table;

/// Similarity (Jaro-Winkler, from 0 to 1) above which a name is suggested for an unknown one.
const SIMILAR: f64 = 0.75;

/// A configuration file whose keys are known.
pub(super) struct ConfigFile {
    pub(super) path: PathBuf,
    pub(super) table: Table,
}

/// Reads a file and checks its keys. One file may serve several commands, so that flags of all commands are known.
pub(super) fn read(path: &Path, root: &Command) -> Result<ConfigFile, String> {
    let shown = path.display();
    let text =
        std::fs::read_to_string(path).map_err(|e| format!("the configuration file {shown} cannot be read: {e}"))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        format!("{shown}: line {line} is not valid TOML: {}", error.message().lines().collect::<Vec<_>>().join(", "))
    })?;
    let mut known = BTreeSet::new();
    names(root, &mut known);
    match table.keys().find(|key| !known.contains(*key)) {
        Some(key) => Err(format!("{shown}: {key} is not a known setting{}", suggestion(key, &known))),
        None => Ok(ConfigFile { path: path.to_path_buf(), table }),
    }
}

/// Long names of the flags of a command and its subcommands.
fn names(command: &Command, known: &mut BTreeSet<String>) {
    let flags = command.get_arguments().filter(|arg| is_setting(arg)).filter_map(|arg| arg.get_long());
    known.extend(flags.filter(|long| *long != "config").map(str::to_owned));
    command.get_subcommands().for_each(|command| names(command, known));
}

fn suggestion(key: &str, known: &BTreeSet<String>) -> String {
    let key = key.replace('_', "-").to_lowercase();
    let scored = known.iter().map(|name| (strsim::jaro_winkler(&key, name), name));
    match scored.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((score, name)) if score > SIMILAR => format!("; did you mean {name}?"),
        _ => "; see the flags that --help lists".into(),
    }
}

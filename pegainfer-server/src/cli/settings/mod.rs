//! Settings: flags that come from the environment or from a configuration file instead of the command line.
//!
//! `--max-num-seqs 64`, `PEGAINFER_MAX_NUM_SEQS=64` and `max-num-seqs = 64` in the file of `--config` mean the same. The
//! command line overrides the environment, which overrides the file. What the environment and the file set is appended to the
//! command line as flags, so that clap parses and checks every value in the same way, and an error is reported with the name
//! under which the user knows the value.

mod added;
mod file;
mod names;

pub(super) use file::parse_table;
pub(super) use names::nearest;
pub use names::{OTHER_VARIABLES, is_setting, unknown_variables, variable_name};

use added::Added;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, Parser};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Reason why a command line cannot be used, or the text that `--help` and `--version` ask for.
#[derive(Debug)]
pub enum ParseError {
    /// The command line itself.
    CommandLine(Box<clap::Error>),
    /// A setting of the environment or of the configuration file, in one sentence.
    Setting(String),
}

/// Parses a command line together with the settings of the environment, which `variable` reads, and of the configuration file.
///
/// # Errors
/// What clap reports about the command line; one sentence about a setting that cannot be used.
pub fn parse<P: Parser>(args: Vec<OsString>, variable: impl Fn(&str) -> Option<OsString>) -> Result<P, ParseError> {
    let command_line = |error| ParseError::CommandLine(Box::new(error));
    let mut root = P::command().ignore_errors(true);
    root.build();
    let matches = root.try_get_matches_from_mut(&args).map_err(command_line)?;
    let added = settings(&root, &matches, &variable).map_err(ParseError::Setting)?;
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let (flags, rest) = args.split_at(end);
    let line = flags.iter().chain(added.iter().flat_map(|added| &added.args)).chain(rest);
    P::try_parse_from(line).map_err(|error| match added.iter().find_map(|added| added.explain(&error)) {
        Some(sentence) => ParseError::Setting(sentence),
        None => command_line(error),
    })
}

/// The settings of the selected command that are not on the command line, whose valid part `matches` is.
fn settings(
    root: &Command,
    matches: &ArgMatches,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Vec<Added>, String> {
    let variable = |long: &str| variable(&variable_name(long)).filter(|value| is_meant(long, value));
    let (mut command, mut matches) = (root, matches);
    while let Some((name, inner)) = matches.subcommand() {
        (command, matches) = (command.find_subcommand(name).unwrap_or(command), inner);
    }
    // A command that another one starts gets all of its arguments from it.
    if command.is_hide_set() {
        return Ok(Vec::new());
    }
    let path = matches.get_one("config").cloned().or_else(|| variable("config").map(PathBuf::from));
    let file = path.map(|path| file::read(path, root)).transpose()?;
    let is_given = |arg: &Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let mut added = Vec::new();
    for arg in command.get_arguments().filter(|arg| is_setting(arg) && !is_given(arg)) {
        let Some(long) = arg.get_long().filter(|long| *long != "config") else { continue };
        if let Some(value) = variable(long) {
            added.push(Added::new(arg, long, variable_name(long), &[value])?);
        } else if let Some((origin, values)) = file.as_ref().and_then(|file| file.values(long)) {
            added.push(Added::new(arg, long, origin, &values)?);
        }
    }
    Ok(added)
}

/// Whether a variable is a setting. An empty one is not, and neither is the `PEGAINFER_PORT=tcp://...` that Kubernetes sets in
/// every container next to a service called pegainfer.
fn is_meant(long: &str, value: &OsStr) -> bool {
    let is_service_link = long == "port" && value.to_str().is_some_and(|value| value.contains("://"));
    !value.is_empty() && !is_service_link
}

#[cfg(test)]
mod tests;

//! Settings: flags that come from the environment or from a configuration file instead of the command line.
//!
//! `--max-num-seqs 64`, `PEGAINFER_MAX_NUM_SEQS=64` and `max-num-seqs = 64` in the file of `--config` mean the same. The
//! command line overrides the environment, which overrides the file. What the environment and the file set is appended to the
//! command line as flags, so that clap parses and checks every value in the same way, and an error is reported with the name
//! under which the user knows the value.

mod file;
mod names;
mod values;

pub use names::{OTHER_VARIABLES, is_setting, unknown_variables, variable_name};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Parser};
use std::error::Error;
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
    let mut command = P::command();
    command.build();
    let mut line = CommandLine { args, added: Vec::new() };
    line.add_settings(&command, &variable).map_err(ParseError::Setting)?;
    P::try_parse_from(line.complete()).map_err(|error| match line.explain(&error) {
        Some(sentence) => ParseError::Setting(sentence),
        None => ParseError::CommandLine(Box::new(error)),
    })
}

/// A flag that is not on the command line.
struct Added {
    long: String,
    /// Name under which the user set it: a variable, or a file and its key.
    origin: String,
    args: Vec<OsString>,
}

struct CommandLine {
    args: Vec<OsString>,
    added: Vec<Added>,
}

impl CommandLine {
    /// Adds the settings of the selected command that are not on the command line.
    fn add_settings(&mut self, root: &Command, variable: &dyn Fn(&str) -> Option<OsString>) -> Result<(), String> {
        let variable = |long: &str| variable(&variable_name(long)).filter(|value| is_meant(long, value));
        let command = selected(root, &self.args);
        // A command that another one starts gets all of its arguments from it.
        if command.is_hide_set() {
            return Ok(());
        }
        let path = self.value_of("config").or_else(|| variable("config")).map(PathBuf::from);
        let file = path.map(|path| file::read(&path, root)).transpose()?;
        for arg in command.get_arguments().filter(|arg| is_setting(arg)) {
            let Some(long) = arg.get_long().filter(|long| *long != "config" && !self.has(arg)) else { continue };
            let (origin, args) = if let Some(value) = variable(long) {
                let name = variable_name(long);
                let args = values::of_variable(arg, long, &value).map_err(|e| format!("{name} {e}"))?;
                (name, args)
            } else if let Some((path, value)) = file.as_ref().and_then(|file| Some((&file.path, file.table.get(long)?)))
            {
                let name = format!("{}: {long}", path.display());
                let args = values::of_toml(arg, long, value).map_err(|e| format!("{name} {e}"))?;
                (name, args)
            } else {
                continue;
            };
            self.added.push(Added { long: long.to_owned(), origin, args });
        }
        Ok(())
    }

    /// The arguments before `--`, without the name of the program.
    fn flags(&self) -> impl Iterator<Item = &OsString> {
        self.args.iter().skip(1).take_while(|arg| *arg != "--")
    }

    /// Whether the command line has the flag, by any of its names.
    fn has(&self, arg: &Arg) -> bool {
        let names = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
        let names: Vec<String> = names.map(|name| format!("--{name}")).collect();
        let short = arg.get_short().map(|short| format!("-{short}"));
        self.flags().filter_map(|given| given.to_str()).any(|given| {
            let name = given.split('=').next().unwrap_or(given);
            names.iter().any(|known| known == name) || short.as_ref().is_some_and(|short| given.starts_with(short))
        })
    }

    /// The value of a flag of the command line.
    fn value_of(&self, long: &str) -> Option<OsString> {
        let name = format!("--{long}");
        let mut flags = self.flags();
        while let Some(flag) = flags.next() {
            if *flag == *name {
                return flags.next().cloned();
            }
            let value = flag.to_str().and_then(|flag| flag.strip_prefix(&name)?.strip_prefix('='));
            if value.is_some() {
                return value.map(OsString::from);
            }
        }
        None
    }

    /// The command line with the added flags: at its end, but before `--`.
    fn complete(&self) -> Vec<OsString> {
        let end = self.flags().count() + 1;
        let (flags, rest) = self.args.split_at(end.min(self.args.len()));
        flags.iter().chain(self.added.iter().flat_map(|added| &added.args)).chain(rest).cloned().collect()
    }

    /// One sentence for an error whose value is an added flag's.
    fn explain(&self, error: &clap::Error) -> Option<String> {
        let (Some(ContextValue::String(flag)), Some(ContextValue::String(value))) =
            (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue))
        else {
            return None;
        };
        let long = flag.strip_prefix("--")?.split([' ', '=']).next()?;
        let added = self.added.iter().find(|added| added.long == long)?;
        let reason = match (error.kind(), error.get(ContextKind::ValidValue)) {
            (ErrorKind::InvalidValue, Some(ContextValue::Strings(valid))) => format!("use {}", valid.join(" or ")),
            _ => error.source().map_or_else(|| error.kind().to_string(), ToString::to_string),
        };
        Some(format!("{} has the invalid value {value:?}: {reason}", added.origin))
    }
}

/// Whether a variable is a setting. An empty one is not, and neither is the `PEGAINFER_PORT=tcp://...` that Kubernetes sets in
/// every container next to a service called pegainfer.
fn is_meant(long: &str, value: &OsStr) -> bool {
    let is_service_link = long == "port" && value.to_str().is_some_and(|value| value.contains("://"));
    !value.is_empty() && !is_service_link
}

/// The command that the arguments select.
fn selected<'a>(root: &'a Command, args: &[OsString]) -> &'a Command {
    args.iter()
        .skip(1)
        .try_fold(root, |command, name| command.find_subcommand(name).ok_or(command))
        .unwrap_or_else(|c| c)
}

#[cfg(test)]
mod tests;

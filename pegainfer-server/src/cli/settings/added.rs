//! A flag from the environment or a file, as an argument.

use crate::cli::help;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction};
use std::error::Error;
use std::ffi::{OsStr, OsString};

/// A flag that is not on the command line.
pub(super) struct Added {
    long: String,
    /// Name under which the user set it: a variable, or a file and its key.
    origin: String,
    pub(super) args: Vec<OsString>,
}

impl Added {
    pub(super) fn new(arg: &Arg, long: &str, origin: String, values: &[OsString]) -> Result<Self, String> {
        let args = match (arg.get_action(), values) {
            (ArgAction::SetTrue, [value]) => match value.to_str().map(str::to_ascii_lowercase).as_deref() {
                Some("true" | "1" | "yes" | "on") => vec![format!("--{long}").into()],
                Some("false" | "0" | "no" | "off") => Vec::new(),
                _ => return Err(format!("{origin} must be true or false, got {value:?}")),
            },
            (ArgAction::Append, _) | (_, [_]) => values.iter().map(|value| with_value(long, value)).collect(),
            _ => return Err(format!("{origin} must be one value, got {}", values.len())),
        };
        Ok(Self { long: long.to_owned(), origin, args })
    }

    /// One sentence for an error whose value is this flag's.
    pub(super) fn explain(&self, error: &clap::Error) -> Option<String> {
        let (Some(ContextValue::String(flag)), Some(ContextValue::String(value))) =
            (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue))
        else {
            return None;
        };
        if flag.strip_prefix("--")?.split([' ', '=']).next()? != self.long {
            return None;
        }
        let reason = match (error.kind(), error.get(ContextKind::ValidValue)) {
            (ErrorKind::InvalidValue, Some(ContextValue::Strings(valid))) => format!("use {}", valid.join(" or ")),
            _ => error.source().map_or_else(|| error.kind().to_string(), ToString::to_string),
        };
        let reason = help::in_words(&reason).unwrap_or(reason);
        Some(format!("{} has the invalid value {value:?}: {reason}", self.origin))
    }
}

fn with_value(long: &str, value: &OsStr) -> OsString {
    let mut arg = OsString::from(format!("--{long}="));
    arg.push(value);
    arg
}

//! Values of the environment and of TOML as arguments of a command line.

use crate::http::Secret;
use clap::{Arg, ArgAction};
use pegainfer_core::schedule::speculation::Speculation;
use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use toml::Value;

/// The arguments that a variable of the environment stands for, or the end of a sentence that begins with its name.
pub(super) fn of_variable(arg: &Arg, long: &str, value: &OsStr) -> Result<Vec<OsString>, String> {
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return Ok(vec![with_value(long, value)]);
    }
    match value.to_str().map(str::to_ascii_lowercase).as_deref() {
        Some("true" | "1" | "yes" | "on") => Ok(vec![format!("--{long}").into()]),
        Some("false" | "0" | "no" | "off") => Ok(Vec::new()),
        _ => Err(format!("must be true or false, got {value:?}")),
    }
}

/// The arguments that a value of the configuration file stands for, or the end of a sentence that begins with its key.
pub(super) fn of_toml(arg: &Arg, long: &str, value: &Value) -> Result<Vec<OsString>, String> {
    let wrong = |expected: &str, got: &Value| format!("must be {expected}, got {}", describe(got));
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(true)) => Ok(vec![format!("--{long}").into()]),
        (ArgAction::SetTrue, Value::Boolean(false)) => Ok(Vec::new()),
        (ArgAction::SetTrue, other) => Err(wrong("true or false", other)),
        (ArgAction::Append, Value::Array(values)) => values.iter().try_fold(Vec::new(), |mut args, value| {
            args.extend(of_toml(arg, long, value)?);
            Ok(args)
        }),
        (_, value) => {
            let kind = Kind::of(arg);
            let text = kind.text(value).ok_or_else(|| wrong(kind.name(), value))?;
            Ok(vec![with_value(long, OsStr::new(&text))])
        }
    }
}

fn with_value(long: &str, value: &OsStr) -> OsString {
    let mut arg = OsString::from(format!("--{long}="));
    arg.push(value);
    arg
}

/// TOML types that a flag's value may have.
enum Kind {
    Text,
    Boolean,
    Integer,
    Number,
    /// A string or a number, as in `"8M"` or `30`.
    Quantity,
    /// A JSON object, as a string or as a table.
    Object,
}

impl Kind {
    fn of(arg: &Arg) -> Self {
        let value = arg.get_value_parser().type_id();
        let is_any = |types: &[TypeId]| types.iter().any(|known| value == *known);
        if is_any(&[TypeId::of::<String>(), TypeId::of::<PathBuf>(), TypeId::of::<Secret>()]) {
            Self::Text
        } else if is_any(&[TypeId::of::<bool>()]) {
            Self::Boolean
        } else if is_any(&[
            TypeId::of::<NonZeroUsize>(),
            TypeId::of::<usize>(),
            TypeId::of::<u16>(),
            TypeId::of::<u32>(),
        ]) {
            Self::Integer
        } else if is_any(&[TypeId::of::<f32>(), TypeId::of::<f64>()]) {
            Self::Number
        } else if value == TypeId::of::<Speculation>() {
            Self::Object
        } else {
            Self::Quantity
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Text => "a string",
            Self::Boolean => "true or false",
            Self::Integer => "a whole number",
            Self::Number => "a number",
            Self::Quantity => "a string or a number",
            Self::Object => "a table, or JSON in a string",
        }
    }

    /// The value as on a command line; `None` if it has another type.
    fn text(&self, value: &Value) -> Option<String> {
        match (self, value) {
            (Self::Object, Value::Table(table)) => serde_json::to_string(table).ok(),
            (Self::Text | Self::Quantity | Self::Object, Value::String(text)) => Some(text.clone()),
            (Self::Boolean, Value::Boolean(flag)) => Some(flag.to_string()),
            (Self::Integer | Self::Number | Self::Quantity, Value::Integer(number)) => Some(number.to_string()),
            (Self::Number | Self::Quantity, Value::Float(number)) => Some(number.to_string()),
            _ => None,
        }
    }
}

fn describe(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "an integer",
        Value::Float(_) => "a float",
        Value::Boolean(_) => "a boolean",
        Value::Datetime(_) => "a date or time",
        Value::Array(_) => "an array",
        Value::Table(_) => "a table",
    }
}

//! A format of traces, and the fields that identify it.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// A format of traces.
#[derive(Debug, PartialEq, Eq)]
pub struct Format {
    /// Name of the format.
    pub name: &'static str,
    /// Kind of file, and the columns or fields that are read, optional ones in brackets.
    pub columns: &'static str,
    /// Column or field of the arrival times, and their unit.
    pub time: &'static str,
}

/// The field names of a JSON object.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct JsonFields(BTreeMap<String, IgnoredAny>);

impl JsonFields {
    /// True if the object has a field of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

//! A format of traces, and the fields that tell which one a file has.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// A format of traces.
#[derive(Debug, PartialEq, Eq)]
pub struct Format {
    /// Name of the format.
    pub name: &'static str,
    /// Kind of file, and the columns or fields that are read; optional ones in brackets.
    pub columns: &'static str,
    /// Column or field of the arrival times, and their unit.
    pub time: &'static str,
}

/// The fields of a JSON object, whatever their values.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct Fields(BTreeMap<String, IgnoredAny>);

impl Fields {
    /// Whether the object has a field of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

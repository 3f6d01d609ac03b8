//! `keep_alive`: how long a model stays in memory without requests.

use crate::models::KeepAlive;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// Longest time: a year.
const MAX_SECONDS: f64 = 365.0 * 86400.0;

/// Seconds, or a text such as `90s`, `5m` or `1h`; a negative number keeps the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeepAliveField(pub KeepAlive);

/// The time of this many seconds.
fn seconds(seconds: f64) -> Option<KeepAliveField> {
    Some(KeepAliveField(match seconds {
        n if n < 0.0 => KeepAlive::Always,
        n if n <= MAX_SECONDS => KeepAlive::For(Duration::from_secs_f64(n)),
        _ => return None,
    }))
}

/// The time of a number with a unit; without a unit, of seconds.
fn parse(text: &str) -> Option<KeepAliveField> {
    let text = text.trim();
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let with_unit = units.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)));
    let (number, unit) = with_unit.unwrap_or((text, 1.0));
    seconds(number.parse::<f64>().ok()? * unit)
}

impl<'de> Deserialize<'de> for KeepAliveField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeepAliveVisitor;

        impl Visitor<'_> for KeepAliveVisitor {
            type Value = KeepAliveField;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of seconds, or a text such as \"5m\" or \"1h\"")
            }

            fn visit_i64<E: Error>(self, n: i64) -> Result<Self::Value, E> {
                seconds(n as f64).ok_or_else(|| E::invalid_value(Unexpected::Signed(n), &self))
            }

            fn visit_u64<E: Error>(self, n: u64) -> Result<Self::Value, E> {
                seconds(n as f64).ok_or_else(|| E::invalid_value(Unexpected::Unsigned(n), &self))
            }

            fn visit_f64<E: Error>(self, n: f64) -> Result<Self::Value, E> {
                seconds(n).ok_or_else(|| E::invalid_value(Unexpected::Float(n), &self))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                parse(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(KeepAliveVisitor)
    }
}

impl JsonSchema for KeepAliveField {
    fn schema_name() -> Cow<'static, str> {
        "KeepAlive".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["number", "string"], "maximum": MAX_SECONDS})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_seconds_and_texts_have_units() {
        let read = |json: &str| serde_json::from_str::<KeepAliveField>(json).ok().map(|field| field.0);
        let seconds = |n: f64| Some(KeepAlive::For(Duration::from_secs_f64(n)));
        for (json, expected) in [
            ("0", seconds(0.0)),
            ("90", seconds(90.0)),
            ("\"90\"", seconds(90.0)),
            ("\"500ms\"", seconds(0.5)),
            ("\"5m\"", seconds(300.0)),
            ("1.5", seconds(1.5)),
            ("\"2h\"", seconds(7200.0)),
            ("-1", Some(KeepAlive::Always)),
            ("\"-1s\"", Some(KeepAlive::Always)),
            ("\"soon\"", None),
            ("\"nan\"", None),
            ("1e300", None),
            ("true", None),
        ] {
            assert_eq!(read(json), expected, "{json}");
        }
    }
}

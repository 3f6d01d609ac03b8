//! Integers with a range, token ids and logit biases, with their errors and schemas.

use super::explain::{OF_PARENT, SENTENCE};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Unexpected, Visitor};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// An integer from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int<const MIN: i64, const MAX: i64>(pub i64);

/// Upper bound of token counts and similar numbers.
pub const MAX_COUNT: i64 = i32::MAX as i64;

/// A number of tokens, at least `MIN`.
pub type Count<const MIN: i64> = Int<MIN, MAX_COUNT>;

impl<const MIN: i64, const MAX: i64> Int<MIN, MAX> {
    /// The number as a count; negative numbers become 0.
    pub fn count(self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }
}

impl<'de, const MIN: i64, const MAX: i64> Deserialize<'de> for Int<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IntVisitor<const MIN: i64, const MAX: i64>;

        impl<const MIN: i64, const MAX: i64> Visitor<'_> for IntVisitor<MIN, MAX> {
            type Value = Int<MIN, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an integer from {MIN} to {MAX}")
            }

            fn visit_i64<E: Error>(self, n: i64) -> Result<Self::Value, E> {
                if (MIN..=MAX).contains(&n) { Ok(Int(n)) } else { Err(E::invalid_value(Unexpected::Signed(n), &self)) }
            }

            fn visit_u64<E: Error>(self, n: u64) -> Result<Self::Value, E> {
                match i64::try_from(n) {
                    Ok(n) => self.visit_i64(n),
                    Err(_) => Err(E::invalid_value(Unexpected::Unsigned(n), &self)),
                }
            }
        }

        deserializer.deserialize_i64(IntVisitor)
    }
}

impl<const MIN: i64, const MAX: i64> JsonSchema for Int<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Int{MIN}To{MAX}").into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": MIN, "maximum": MAX})
    }
}

/// The id of a token. The vocabulary is checked later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenId(pub u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenVisitor;

        impl Visitor<'_> for TokenVisitor {
            type Value = TokenId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{OF_PARENT}hold token ids")
            }

            fn visit_u64<E: Error>(self, n: u64) -> Result<TokenId, E> {
                u32::try_from(n).map(TokenId).map_err(|_| E::invalid_value(Unexpected::Unsigned(n), &self))
            }
        }

        deserializer.deserialize_u64(TokenVisitor)
    }
}

impl JsonSchema for TokenId {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "TokenId".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
    }
}

/// Map from token ids, as keys of a JSON object, to values added to their logits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitBias(pub BTreeMap<u32, f32>);

/// Maximum number of entries of a [`LogitBias`].
pub const MAX_BIASES: usize = 1024;

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;

        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    // One spelling per token, so that none is repeated.
                    let token = key.parse().ok().filter(|token: &u32| token.to_string() == key);
                    let Some(token) = token else {
                        let key = crate::error::truncate_for_error(&key);
                        let message = format!("{SENTENCE}the keys of logit_bias must be token ids, got {key:?}");
                        return Err(A::Error::custom(message));
                    };
                    let Bias(bias) = map.next_value()?;
                    biases.insert(token, bias);
                    if biases.len() > MAX_BIASES {
                        return Err(A::Error::custom(format!("may hold at most {MAX_BIASES} tokens")));
                    }
                }
                Ok(LogitBias(biases))
            }
        }

        deserializer.deserialize_map(BiasVisitor)
    }
}

impl JsonSchema for LogitBias {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "LogitBias".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let bias = serde_json::json!({"type": "number", "minimum": -100, "maximum": 100});
        json_schema!({"type": "object", "maxProperties": MAX_BIASES, "patternProperties": {"^(0|[1-9][0-9]{0,8})$": bias},
            "additionalProperties": false})
    }
}

/// A value added to a logit.
struct Bias(f32);

impl<'de> Deserialize<'de> for Bias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl Visitor<'_> for NumberVisitor {
            type Value = Bias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{OF_PARENT}hold numbers from -100 to 100")
            }

            fn visit_f64<E>(self, n: f64) -> Result<Bias, E> {
                Ok(Bias(n as f32))
            }

            fn visit_i64<E>(self, n: i64) -> Result<Bias, E> {
                Ok(Bias(n as f32))
            }

            fn visit_u64<E>(self, n: u64) -> Result<Bias, E> {
                Ok(Bias(n as f32))
            }
        }

        deserializer.deserialize_f64(NumberVisitor)
    }
}

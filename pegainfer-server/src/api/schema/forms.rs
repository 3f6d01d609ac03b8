//! Fields that are a string or something else, such as contents in all APIs.

use super::values::Object;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{Error as ValueError, MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

/// The other form of a field that may be a string.
pub trait Alternative {
    /// All forms of the field in words, for errors.
    const FORMS: &'static str;
    /// True if it is a list; otherwise it is an object.
    const IS_LIST: bool;
}

impl<T> Alternative for Vec<Object<T>> {
    const FORMS: &'static str = "a string or a list of objects";
    const IS_LIST: bool = true;
}

/// A string (possibly one of a few names) or another value.
#[derive(Debug, Clone, PartialEq)]
pub enum TextOr<T, S = String> {
    /// A string.
    Text(S),
    /// Another value.
    Other(T),
}

/// A string, or a list.
pub type TextOrList<T> = TextOr<Vec<T>>;

struct FormsVisitor<T, S>(PhantomData<(T, S)>);

impl<'de, T: Alternative + Deserialize<'de>, S: for<'a> Deserialize<'a>> Visitor<'de> for FormsVisitor<T, S> {
    type Value = TextOr<T, S>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::FORMS)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let parsed: Result<S, ValueError> = S::deserialize(text.into_deserializer());
        parsed.map(TextOr::Text).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        if !T::IS_LIST {
            return Err(A::Error::invalid_type(Unexpected::Seq, &self));
        }
        T::deserialize(SeqAccessDeserializer::new(list)).map(TextOr::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        if T::IS_LIST {
            return Err(A::Error::invalid_type(Unexpected::Map, &self));
        }
        T::deserialize(MapAccessDeserializer::new(map)).map(TextOr::Other)
    }
}

impl<'de, T: Alternative + Deserialize<'de>, S: for<'a> Deserialize<'a>> Deserialize<'de> for TextOr<T, S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FormsVisitor(PhantomData))
    }
}

impl<T: JsonSchema, S: JsonSchema> JsonSchema for TextOr<T, S> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("{}Or{}", S::schema_name(), T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [generator.subschema_for::<S>(), generator.subschema_for::<T>()]})
    }
}

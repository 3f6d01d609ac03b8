//! Fields that are a string or a list, as contents are in all APIs.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

/// A string, or a list of objects.
#[derive(Debug, Clone, PartialEq)]
pub enum TextOrList<T> {
    /// A string.
    Text(String),
    /// A list.
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOrList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
            type Value = TextOrList<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of objects")
            }

            fn visit_str<E>(self, text: &str) -> Result<TextOrList<T>, E> {
                Ok(TextOrList::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TextOrList<T>, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(TextOrList::List(items))
            }
        }

        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for TextOrList<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("TextOr{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": generator.subschema_for::<T>()}]})
    }
}

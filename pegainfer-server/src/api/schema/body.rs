//! A request body, parsed into structs one part at a time, and the fields that no part knows.

use super::explain::{explain, invalid_json};
use crate::error::{ApiError, truncate_for_error};
use axum::http::StatusCode;
use serde::de::value::MapDeserializer;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_ignored::Path;
use serde_json::Value;
use serde_json::value::RawValue;
use serde_path_to_error::Track;
use std::borrow::Cow;
use std::fmt;

/// The fields of a JSON object that have not been parsed yet, as slices of its text.
pub struct Body<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// For each field, true if a part of the request knows it.
    known: Vec<bool>,
    /// Paths of unknown fields inside known ones, such as `messages[].foo`.
    nested: Vec<String>,
    /// Name of the field whose value this is; empty for the body of a request.
    path: &'static str,
}

impl<'a> Body<'a> {
    /// Checks that the text is a JSON object, and that no object in it repeats a key. Fields that are `null` count as
    /// absent.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ApiError> {
        let bad = |message: String| ApiError::new(StatusCode::BAD_REQUEST, message);
        let invalid = |e: serde_json::Error| bad(format!("the request body is not valid JSON: {e}"));
        let text = std::str::from_utf8(bytes)
            .map_err(|e| bad(format!("the request body is not valid UTF-8 at byte {}", e.valid_up_to())))?;
        if !text.trim_start().starts_with('{') {
            serde_json::from_str::<IgnoredAny>(text).map_err(invalid)?;
            return Err(bad("the request body must be a JSON object".into()));
        }
        let RawFields(mut fields) = serde_json::from_str(text).map_err(invalid)?;
        // Only objects can repeat a key.
        for (name, value) in fields.iter().filter(|(_, value)| value.get().contains('{')) {
            let distinct: Result<Distinct, _> = serde_json::from_str(value.get());
            distinct.map_err(|error| invalid_json(&truncate_for_error(name), &error))?;
        }
        fields.retain(|(_, value)| value.get() != "null");
        Ok(Self::of(fields, ""))
    }

    fn of(fields: Vec<(Cow<'a, str>, &'a RawValue)>, path: &'static str) -> Self {
        let known = vec![false; fields.len()];
        Self { fields, known, nested: Vec::new(), path }
    }

    /// The object in a field, whose own fields are then parsed in parts; without fields if the field is absent. Errors
    /// name the paths of its fields.
    pub fn object(&mut self, name: &'static str) -> Result<Self, ApiError> {
        let Some(at) = self.fields.iter().position(|(field, _)| field == name) else {
            return Ok(Self::of(Vec::new(), name));
        };
        self.known[at] = true;
        let value = self.fields[at].1.get();
        let RawFields(mut fields) =
            serde_json::from_str(value).map_err(|error| explain(name, &Track::new().path(), &error))?;
        fields.retain(|(_, value)| value.get() != "null");
        Ok(Self::of(fields, name))
    }

    /// The name of a field as the client sees it, with the path of this object.
    pub fn full_name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Parses one part of the request from its fields. Other fields are ignored.
    pub fn read<T: Deserialize<'a>>(&mut self) -> Result<T, ApiError> {
        let (nested, within) = (&mut self.nested, self.path);
        let mut ignore = |path: Path<'_>| {
            let name = name_of(&path);
            let path = if within.is_empty() { name } else { format!("{within}.{name}") };
            if !nested.contains(&path) && nested.len() < MAX_NESTED {
                nested.push(path);
            }
        };
        let mut track = Track::new();
        let part = StructFields { fields: &self.fields, known: &mut self.known };
        let tracked = serde_path_to_error::Deserializer::new(part, &mut track);
        T::deserialize(serde_ignored::Deserializer::new(tracked, &mut ignore))
            .map_err(|error| explain(within, &track.path(), &error))
    }

    /// True if the body has this field.
    pub fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|(field, _)| field == name)
    }

    /// The value of a field; null if absent.
    pub fn value(&self, name: &str) -> Value {
        let field = self.fields.iter().find(|(field, _)| field == name);
        field.and_then(|(_, value)| serde_json::from_str(value.get()).ok()).unwrap_or_default()
    }

    /// Reports a field that has no effect.
    pub fn ignore(&mut self, path: String) {
        if !self.nested.contains(&path) && self.nested.len() < MAX_NESTED {
            self.nested.push(path);
        }
    }

    /// The fields that no part knows, and the paths of unknown fields inside known ones.
    pub fn rest(&self) -> (impl Iterator<Item = (&str, &RawValue)>, &[String]) {
        let unknown = self.fields.iter().zip(&self.known).filter(|(_, known)| !**known);
        (unknown.map(|((name, value), _)| (&**name, *value)), &self.nested)
    }
}

/// Maximum number of unknown nested paths that are kept, more than the response header lists.
const MAX_NESTED: usize = 64;

/// Name of an ignored field, such as `messages[].foo`, without list indices.
fn name_of(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, .. } => name_of(parent) + "[]",
        Path::Map { parent, key } => match name_of(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => name_of(parent),
    }
}

/// Gives a struct its fields, and marks them as known.
struct StructFields<'a, 'b> {
    fields: &'b [(Cow<'a, str>, &'a RawValue)],
    known: &'b mut [bool],
}

impl<'de> Deserializer<'de> for StructFields<'de, '_> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("a part of a request must be a struct with fields"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let fields = self.fields.iter().zip(self.known).filter(|((name, _), _)| names.contains(&&**name));
        let fields = fields.map(|((name, value), known)| {
            *known = true;
            (&**name, *value)
        });
        visitor.visit_map(MapDeserializer::new(fields))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The key of an object, borrowed from the text where it has no escapes.
struct ObjectKey<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for ObjectKey<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = ObjectKey<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<ObjectKey<'de>, E> {
                Ok(ObjectKey(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<ObjectKey<'de>, E> {
                Ok(ObjectKey(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(KeyVisitor)
    }
}

/// The fields of an object, as slices of its text.
struct RawFields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for RawFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = RawFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawFields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some((ObjectKey(key), value)) = map.next_entry::<ObjectKey<'de>, &'de RawValue>()? {
                    fields.push((key, value));
                }
                check_distinct(fields.iter().map(|(key, _)| &**key))?;
                Ok(RawFields(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// Checks that no key of an object is repeated.
fn check_distinct<'a, E: Error>(keys: impl Iterator<Item = &'a str>) -> Result<(), E> {
    let mut keys: Vec<&str> = keys.collect();
    keys.sort_unstable();
    match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(twice) => {
            let key = truncate_for_error(twice[0]);
            Err(E::custom(format!("an object has the key {key:?} twice")))
        }
    }
}

/// Any JSON value without repeated keys. Its content is dropped.
struct Distinct;

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DistinctVisitor)
    }
}

struct DistinctVisitor;

impl<'de> Visitor<'de> for DistinctVisitor {
    type Value = Distinct;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Distinct, A::Error> {
        let mut keys = Vec::new();
        while let Some((ObjectKey(key), Distinct)) = map.next_entry()? {
            keys.push(key);
        }
        check_distinct(keys.iter().map(|key| &**key))?;
        Ok(Distinct)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Distinct, A::Error> {
        while seq.next_element::<Distinct>()?.is_some() {}
        Ok(Distinct)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_str<E>(self, _: &str) -> Result<Distinct, E> {
        Ok(Distinct)
    }

    fn visit_unit<E>(self) -> Result<Distinct, E> {
        Ok(Distinct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::values::Object;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    struct Inner {
        name: Option<String>,
    }

    #[derive(Debug, Deserialize)]
    struct First {
        list: Option<Vec<Object<Inner>>>,
    }

    #[derive(Debug, Deserialize)]
    struct Second {
        flag: Option<bool>,
    }

    fn error(text: &str) -> String {
        match Body::parse(text.as_bytes()) {
            Err(error) => error.body(),
            Ok(mut body) => body.read::<First>().unwrap_err().body(),
        }
    }

    #[test]
    fn parts_share_a_body_and_leave_what_none_knows() {
        let text = br#"{"list": [{"name": "a", "x": 1}, {"x": 2, "y": {}}], "flag": true, "z": [1], "n": null}"#;
        let mut body = Body::parse(text).unwrap();
        let First { list } = body.read().unwrap();
        assert_eq!(list.unwrap()[0].name.as_deref(), Some("a"));
        let Second { flag } = body.read().unwrap();
        assert_eq!(flag, Some(true));
        let (rest, nested) = body.rest();
        let rest: Vec<(&str, &str)> = rest.map(|(name, value)| (name, value.get())).collect();
        assert_eq!((rest, nested), (vec![("z", "[1]")], &["list[].x".to_owned(), "list[].y".to_owned()][..]));
    }

    #[test]
    fn errors_name_the_path() {
        for (text, expected) in [
            (r#"{"list": 5}"#, "list must be a list, got 5"),
            (r#"{"list": [{}, 5]}"#, "list[1] must be an object, got 5"),
            (r#"{"list": [["a"]]}"#, "list[0] must be an object, got a list"),
            (r#"{"list": [{"name": 1.5}]}"#, "list[0].name must be a string, got 1.5"),
            (r#"{"list": [{"name": "a", "name": "b"}]}"#, "an object has the key \\\"name\\\" twice"),
            (r#"{"x": {"y": [{"a": 1, "a": 1}]}}"#, "an object has the key \\\"a\\\" twice"),
            (r#"{"x": 1, "\u0078": 2}"#, "an object has the key \\\"x\\\" twice"),
            ("[]", "must be a JSON object"),
            ("{", "not valid JSON: EOF"),
        ] {
            let error = error(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(error(r#"{"list": [{"name": 1}]}"#).contains("\"param\":\"list\""));
    }
}

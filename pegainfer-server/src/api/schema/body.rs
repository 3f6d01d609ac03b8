//! A request body: parsed into structs, one part after the other, and judged by what no part has known.

use super::explain::explain;
use super::values::Object;
use crate::error::ApiError;
use axum::http::StatusCode;
use serde::de::value::MapDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_ignored::Path;
use serde_json::Value;
use serde_json::value::RawValue;
use serde_path_to_error::Track;
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

/// The fields of a JSON object that have not been parsed yet, as slices of its text.
pub struct Body<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// For each field, whether a part of the request has known it.
    known: Vec<bool>,
    /// Paths of unknown fields inside known ones, such as `messages[].foo`.
    nested: Vec<String>,
}

impl<'a> Body<'a> {
    /// Checks that the text is a JSON object in which no object has a key twice. Fields that are `null` count as absent.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ApiError> {
        let bad = |message: String| ApiError::new(StatusCode::BAD_REQUEST, message);
        let text = std::str::from_utf8(bytes)
            .map_err(|e| bad(format!("the request body is not valid UTF-8 at byte {}", e.valid_up_to())))?;
        let Valid { is_object } =
            serde_json::from_str(text).map_err(|e| bad(format!("the request body is not valid JSON: {e}")))?;
        if !is_object {
            return Err(bad("the request body must be a JSON object".into()));
        }
        let Fields(mut fields) =
            serde_json::from_str(text).map_err(|e| bad(format!("the request body is not valid JSON: {e}")))?;
        fields.retain(|(_, value)| value.get() != "null");
        let known = vec![false; fields.len()];
        Ok(Self { fields, known, nested: Vec::new() })
    }

    /// Parses one part of the request from the fields that it knows.
    pub fn read<T: Deserialize<'a>>(&mut self) -> Result<T, ApiError> {
        let mut unknown = vec![false; self.fields.len()];
        // The field that is being read: what is ignored at the top level is this one.
        let current = Cell::new(0);
        let nested = &mut self.nested;
        let mut ignore = |path: Path<'_>| match name_of(&path) {
            (_, true) => unknown[current.get()] = true,
            (path, false) => {
                if !nested.contains(&path) && nested.len() < MAX_NESTED {
                    nested.push(path);
                }
            }
        };
        let mut track = Track::new();
        let fields = self.fields.iter().enumerate().map(|(at, (name, value))| {
            current.set(at);
            (&**name, *value)
        });
        let fields = MapDeserializer::<_, serde_json::Error>::new(fields);
        let tracked = serde_path_to_error::Deserializer::new(fields, &mut track);
        let Object(part) = Object::deserialize(serde_ignored::Deserializer::new(tracked, &mut ignore))
            .map_err(|error| explain(&track.path(), &error))?;
        for (known, unknown) in self.known.iter_mut().zip(unknown) {
            *known |= !unknown;
        }
        Ok(part)
    }

    /// Whether the body has this field.
    pub fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|(field, _)| field == name)
    }

    /// The value of a field, null if it is absent.
    pub fn value(&self, name: &str) -> Value {
        let field = self.fields.iter().find(|(field, _)| field == name);
        field.and_then(|(_, value)| serde_json::from_str(value.get()).ok()).unwrap_or_default()
    }

    /// Reports a field that was read and has no effect.
    pub fn ignore(&mut self, path: String) {
        if !self.nested.contains(&path) && self.nested.len() < MAX_NESTED {
            self.nested.push(path);
        }
    }

    /// The fields that no part has known, and the paths of unknown fields inside known ones.
    pub fn rest(&self) -> (impl Iterator<Item = (&str, &RawValue)>, &[String]) {
        let unknown = self.fields.iter().zip(&self.known).filter(|(_, known)| !**known);
        (unknown.map(|((name, value), _)| (&**name, *value)), &self.nested)
    }
}

/// Maximum number of paths of unknown nested fields that are kept; more than the response header lists.
const MAX_NESTED: usize = 64;

/// Name of an ignored field; false if it is a path into a field. Indices of lists are left out.
fn name_of(path: &Path<'_>) -> (String, bool) {
    match path {
        Path::Root => (String::new(), true),
        Path::Seq { parent, .. } => (name_of(parent).0 + "[]", false),
        Path::Map { parent, key } => match name_of(parent) {
            (parent, _) if parent.is_empty() => (key.clone(), true),
            (parent, _) => (format!("{parent}.{key}"), false),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => name_of(parent),
    }
}

/// The key of an object, borrowed from the text where it has no escapes.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(KeyVisitor)
    }
}

/// The fields of an object, as slices of its text.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some((Key(key), value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                    fields.push((key, value));
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// Any JSON value whose objects have each key once. Nothing of it is kept.
struct Valid {
    is_object: bool,
}

impl<'de> Deserialize<'de> for Valid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValidVisitor)
    }
}

struct ValidVisitor;

impl<'de> Visitor<'de> for ValidVisitor {
    type Value = Valid;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Valid, A::Error> {
        let mut keys = Vec::new();
        while let Some((key, Valid { .. })) = map.next_entry::<Key<'de>, Valid>()? {
            keys.push(key);
        }
        keys.sort_unstable();
        if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            let key = crate::error::truncate_for_error(&twice[0].0);
            return Err(A::Error::custom(format!("an object has the key {key:?} twice")));
        }
        Ok(Valid { is_object: true })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Valid, A::Error> {
        while seq.next_element::<Valid>()?.is_some() {}
        Ok(Valid { is_object: false })
    }

    fn visit_bool<E>(self, _: bool) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }

    fn visit_i64<E>(self, _: i64) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }

    fn visit_u64<E>(self, _: u64) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }

    fn visit_f64<E>(self, _: f64) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }

    fn visit_str<E>(self, _: &str) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }

    fn visit_unit<E>(self) -> Result<Valid, E> {
        Ok(Valid { is_object: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

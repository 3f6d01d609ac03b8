//! Fields of `/inference/v1/generate`: vLLM's request with token ids. Its sampling parameters are an object.

use super::generation::{MAX_LOGPROBS, StreamOptionsFields};
use super::numbers::{Count, Int, TokenId};
use super::sampling::SamplingFields;
use super::structure::StructuredOutputsFields;
use super::values::{Object, Texts, names};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;

/// Name of the field with the sampling parameters.
pub const SAMPLING_PARAMS: &str = "sampling_params";
/// Fields of [`SamplingFields`] that belong to the request, not to its sampling parameters.
pub const OF_REQUEST: [&str; 3] = ["priority", "cache_salt", "request_id"];

/// A request for the tokens after a list of tokens.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct TokenInOutFields {
    /// Token ids of the prompt, at least one.
    #[schemars(required)]
    pub token_ids: Option<Vec<TokenId>>,
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// Send events as tokens are generated.
    pub stream: Option<bool>,
    /// Options of a stream; only allowed with "stream": true.
    pub stream_options: Option<Object<StreamOptionsFields>>,
    /// Becomes part of the response's id.
    pub request_id: Option<String>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Lower numbers leave the queue first.
    pub priority: Option<Int<{ i32::MIN as i64 }, { i32::MAX as i64 }>>,
    /// What a choice has: its tokens, or also its text.
    pub output_mode: Option<OutputMode>,
    /// Also send the token ids of the prompt.
    pub return_token_ids: Option<bool>,
    /// Only empty lists: images come with messages only.
    pub features: Option<NoFeatures>,
}

names! {
    /// What a choice of the response has.
    OutputMode {
        /// Token ids.
        Tokens = "tokens",
        /// Token ids and text.
        Text = "text",
    }
}

/// Sampling parameters that other endpoints have next to their prompt.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ChoiceFields {
    /// Number of choices.
    pub n: Option<Int<1, 128>>,
    /// Maximum number of tokens to generate; less if the context is full earlier.
    pub max_tokens: Option<Count<1>>,
    /// Strings that end the text, at most 16.
    pub stop: Option<Texts>,
    /// Include the stop string in the text.
    pub include_stop_str_in_output: Option<bool>,
    /// Number of most likely tokens to report at each position.
    pub logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Number of most likely tokens to report at each position of the prompt.
    pub prompt_logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Structured output: one of json, json_object, regex, choice and grammar.
    pub structured_outputs: Option<Object<StructuredOutputsFields>>,
}

/// The schema of the object with the sampling parameters, as the only property of an object.
pub fn sampling_params_schema(generator: &mut SchemaGenerator) -> Schema {
    let mut properties = Map::new();
    for part in [ChoiceFields::json_schema(generator), SamplingFields::json_schema(generator)] {
        if let Some(Value::Object(fields)) = part.to_value().get_mut("properties").map(Value::take) {
            properties.extend(fields);
        }
    }
    properties.retain(|name, _| !OF_REQUEST.contains(&name.as_str()));
    let description = "How to draw tokens, and how many.";
    let params = json_schema!({"type": ["object", "null"], "description": description, "properties": properties});
    json_schema!({"type": "object", "properties": {SAMPLING_PARAMS: params}})
}

/// Features of images, of which there are none: objects and lists without values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoFeatures;

impl<'de> Deserialize<'de> for NoFeatures {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NoFeaturesVisitor { is_inner: false })
    }
}

struct NoFeaturesVisitor {
    is_inner: bool,
}

/// A value inside of features.
struct InnerFeatures;

impl<'de> Deserialize<'de> for InnerFeatures {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NoFeaturesVisitor { is_inner: true }).map(|NoFeatures| Self)
    }
}

impl<'de> Visitor<'de> for NoFeaturesVisitor {
    type Value = NoFeatures;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of empty lists, because token ids come without images")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NoFeatures, A::Error> {
        while let Some((IgnoredAny, InnerFeatures)) = map.next_entry()? {}
        Ok(NoFeatures)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<NoFeatures, A::Error> {
        match (self.is_inner, list.next_element::<IgnoredAny>()?) {
            (true, None) => Ok(NoFeatures),
            _ => Err(A::Error::custom("must be an object of empty lists, because token ids come without images")),
        }
    }

    fn visit_unit<E: Error>(self) -> Result<NoFeatures, E> {
        Ok(NoFeatures)
    }
}

impl JsonSchema for NoFeatures {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "NoFeatures".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let of_kind =
            json_schema!({"type": ["null", "object"], "additionalProperties": {"type": "array", "maxItems": 0}});
        json_schema!({"type": "object", "additionalProperties": of_kind})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::Body;
    use serde_json::json;

    #[test]
    fn features_without_images_are_taken() {
        let read = |features: Value| {
            let text = json!({"token_ids": [1], "features": features}).to_string();
            Body::parse(text.as_bytes()).unwrap().read::<TokenInOutFields>().map(|fields| fields.features)
        };
        for empty in [json!({}), json!({"mm_hashes": {"image": []}, "kwargs_data": null})] {
            assert_eq!(read(empty.clone()).unwrap(), Some(NoFeatures), "{empty}");
        }
        for image in [json!({"mm_hashes": {"image": ["x"]}}), json!([]), json!("x"), json!({"a": 5})] {
            let error = read(image.clone()).unwrap_err().body();
            assert!(error.contains("\"param\":\"features\"") && error.contains("without images"), "{image}: {error}");
        }
    }

    #[test]
    fn errors_name_the_parameter() {
        let text = json!({"sampling_params": {"temperature": "x", "top_p": null, "foo": 1}}).to_string();
        let mut body = Body::parse(text.as_bytes()).unwrap();
        let mut params = body.object(SAMPLING_PARAMS).unwrap();
        let error = params.read::<SamplingFields>().unwrap_err().body();
        assert!(
            error.contains("sampling_params.temperature must be a number")
                && error.contains("\"param\":\"sampling_params\""),
            "{error}"
        );
        let other = json!({"sampling_params": [1]}).to_string();
        let error = Body::parse(other.as_bytes()).unwrap().object(SAMPLING_PARAMS).err().unwrap().body();
        assert!(error.contains("sampling_params must be an object, got a list"), "{error}");
    }
}

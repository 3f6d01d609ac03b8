//! Fields of `/v1/completions` only.

use super::generation::MAX_LOGPROBS;
use super::numbers::{Int, TokenId};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};
use std::borrow::Cow;
use std::fmt;

/// Maximum number of prompts of a completion.
const MAX_PROMPTS: usize = 256;
/// The forms of a prompt, for errors.
const FORMS: &str = "a string, a list of strings, a list of token ids, or a list of such lists";

/// Prompt fields of a completion.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct CompletionFields {
    /// A text, token ids, or a list of either.
    #[schemars(required)]
    pub prompt: Option<PromptInput>,
    /// Number of most likely tokens to report at each position.
    pub logprobs: Option<Int<0, MAX_LOGPROBS>>,
    /// Begin the text with the prompt.
    pub echo: Option<bool>,
}

/// Value of the `prompt` field, at most `MAX` prompts. An empty list is a list of no texts.
#[derive(Debug, Clone, PartialEq)]
pub enum PromptInput<const MAX: usize = MAX_PROMPTS> {
    /// Texts.
    Texts(Vec<String>),
    /// Token ids.
    Ids(Vec<Vec<u32>>),
}

impl<const MAX: usize> PromptInput<MAX> {
    /// Number of prompts.
    pub fn count(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Ids(lists) => lists.len(),
        }
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for PromptInput<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor::<MAX>)
    }
}

struct PromptVisitor<const MAX: usize>;

impl<'de, const MAX: usize> Visitor<'de> for PromptVisitor<MAX> {
    type Value = PromptInput<MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FORMS)
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptInput<MAX>, E> {
        Ok(PromptInput::Texts(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptInput<MAX>, A::Error> {
        match list.next_element()? {
            None => Ok(PromptInput::Texts(Vec::new())),
            Some(First::Text(first)) => prompts(first, &mut list, MAX).map(PromptInput::Texts),
            Some(First::Ids(first)) => prompts(first, &mut list, MAX).map(PromptInput::Ids),
            Some(First::Id(first)) => {
                let mut ids = vec![first];
                while let Some(TokenId(id)) = list.next_element()? {
                    ids.push(id);
                }
                Ok(PromptInput::Ids(vec![ids]))
            }
        }
    }
}

/// The first value of a list of at most `max` prompts and all others, which have the same form.
fn prompts<'de, T, A: SeqAccess<'de>>(first: T, list: &mut A, max: usize) -> Result<Vec<T>, A::Error>
where
    First: Into<Option<T>>,
{
    let mut all = vec![first];
    let mut count = 1;
    while let Some(next) = list.next_element::<First>()? {
        let Some(next) = next.into() else {
            return Err(A::Error::custom(format!("must be {FORMS}")));
        };
        count += 1;
        if count <= max {
            all.push(next);
        }
    }
    if count > max {
        return Err(A::Error::custom(format!("may hold at most {max} prompts, got {count}")));
    }
    Ok(all)
}

/// The first element of a `prompt` list.
enum First {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl From<First> for Option<String> {
    fn from(value: First) -> Self {
        if let First::Text(text) = value { Some(text) } else { None }
    }
}

impl From<First> for Option<Vec<u32>> {
    fn from(value: First) -> Self {
        if let First::Ids(ids) = value { Some(ids) } else { None }
    }
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstVisitor;

        impl<'de> Visitor<'de> for FirstVisitor {
            type Value = First;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}hold token ids", super::explain::OF_PARENT)
            }

            fn visit_str<E>(self, text: &str) -> Result<First, E> {
                Ok(First::Text(text.to_owned()))
            }

            fn visit_u64<E: Error>(self, n: u64) -> Result<First, E> {
                u32::try_from(n).map(First::Id).map_err(|_| E::invalid_value(Unexpected::Unsigned(n), &self))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<First, A::Error> {
                let mut ids = Vec::new();
                while let Some(TokenId(id)) = list.next_element()? {
                    ids.push(id);
                }
                Ok(First::Ids(ids))
            }
        }

        deserializer.deserialize_any(FirstVisitor)
    }
}

impl<const MAX: usize> JsonSchema for PromptInput<MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Prompts{MAX}").into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (text, id) = (generator.subschema_for::<String>(), generator.subschema_for::<TokenId>());
        let list = |items: Schema| json_schema!({"type": "array", "items": items});
        let prompts_of = |items: Schema| json_schema!({"type": "array", "items": items, "maxItems": MAX});
        json_schema!({"anyOf": [text.clone(), prompts_of(text), list(id.clone()), prompts_of(list(id))]})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::Body;
    use serde_json::{Value, json};

    fn prompt(value: Value) -> Result<Option<PromptInput>, String> {
        let text = json!({ "prompt": value }).to_string();
        let fields = Body::parse(text.as_bytes()).unwrap().read::<CompletionFields>();
        fields.map(|fields| fields.prompt).map_err(|e| e.body())
    }

    #[test]
    fn the_four_forms_of_a_prompt() {
        let texts = |texts: &[&str]| Ok(Some(PromptInput::Texts(texts.iter().map(|t| t.to_string()).collect())));
        assert_eq!(prompt(json!("a")), texts(&["a"]));
        assert_eq!(prompt(json!(["a", "b"])), texts(&["a", "b"]));
        assert_eq!(prompt(json!([1, 2])), Ok(Some(PromptInput::Ids(vec![vec![1, 2]]))));
        assert_eq!(prompt(json!([[1], [2, 3]])), Ok(Some(PromptInput::Ids(vec![vec![1], vec![2, 3]]))));
        assert_eq!(prompt(json!([])), texts(&[]));
    }

    #[test]
    fn other_forms_are_refused() {
        for bad in [json!(5), json!({}), json!([1, "a"]), json!(["a", 1]), json!([[1], "a"]), json!([-1]), json!([1.5])]
            .into_iter()
            .chain([json!([4294967297u64]), json!([["a"]]), json!(vec!["a"; 257])])
        {
            assert!(prompt(bad.clone()).unwrap_err().contains("\"param\":\"prompt\""), "{bad}");
        }
    }
}

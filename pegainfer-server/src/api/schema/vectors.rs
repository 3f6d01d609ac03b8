//! Fields of `/v1/embeddings`, `/v1/rerank` and `/v1/score`.

use super::completions::PromptInput;
use super::explain::OF_PARENT;
use super::generation::Side;
use super::keep_alive::KeepAliveField;
use super::numbers::{Count, Int};
use super::values::names;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// Maximum number of texts of a request, as in OpenAI's API.
pub const MAX_INPUTS: usize = 2048;
/// Maximum number of documents that are ranked.
pub const MAX_DOCUMENTS: usize = 1000;

/// Fields of all requests for vectors and scores.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct VectorFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// How long the model stays in memory after its last request, if it is not pinned.
    pub keep_alive: Option<KeepAliveField>,
    /// Truncate each text to this many tokens; -1 truncates it to the context.
    pub truncate_prompt_tokens: Option<Count<-1>>,
    /// Side of a text that is truncated; its end by default.
    pub truncation_side: Option<Side>,
    /// Lower numbers leave the queue first.
    pub priority: Option<Int<{ i32::MIN as i64 }, { i32::MAX as i64 }>>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Not used.
    pub user: Option<String>,
}

/// Texts to embed.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct EmbeddingFields {
    /// A text, token ids, or a list of either.
    #[schemars(required)]
    pub input: Option<PromptInput<MAX_INPUTS>>,
    /// Numbers of a vector that are kept, its first ones; the vector is normalised again.
    pub dimensions: Option<Count<1>>,
    /// How vectors are written.
    pub encoding_format: Option<VectorFormat>,
    /// Scale vectors to length 1; true by default.
    pub use_activation: Option<bool>,
    /// Let the tokenizer add its special tokens, such as the end of the text, to texts; true by default.
    pub add_special_tokens: Option<bool>,
}

names! {
    /// How vectors are written.
    VectorFormat {
        /// A list of numbers.
        Float = "float",
        /// The numbers as 32-bit floats, little-endian, in base64.
        Base64 = "base64",
    }
}

/// Documents to rank.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct RerankFields {
    /// What is looked for.
    #[schemars(required)]
    pub query: Option<String>,
    /// Texts, or objects with a text.
    pub documents: Option<Documents>,
    /// Another name of documents, with the answer of Text Embeddings Inference: a list.
    pub texts: Option<Documents>,
    /// Number of results, the best ones; all by default and if it is 0.
    pub top_n: Option<Count<0>>,
    /// Send the documents back.
    pub return_documents: Option<bool>,
    /// Another name of return_documents.
    pub return_text: Option<bool>,
    /// What the model is to judge, instead of whether a web search would want the document.
    pub instruction: Option<String>,
    /// Send differences of logits instead of probabilities.
    pub raw_scores: Option<bool>,
    /// Truncate pairs that do not fit the context.
    pub truncate: Option<bool>,
    /// Maximum number of tokens of a document.
    pub max_tokens_per_doc: Option<Count<1>>,
}

/// Pairs of texts to compare.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ScoreFields {
    /// First texts: one for all, or one for each of the others.
    pub text_1: Option<Documents>,
    /// Second texts.
    pub text_2: Option<Documents>,
    /// Another name of text_1.
    pub queries: Option<Documents>,
    /// Another name of text_2.
    pub documents: Option<Documents>,
    /// Another name of text_2.
    pub items: Option<Documents>,
    /// What the model is to judge.
    pub instruction: Option<String>,
}

/// A text, or a list of texts and objects with a field `text`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Documents(pub Vec<String>);

/// The forms of documents, for errors.
const FORMS: &str = "a string, or a list of strings or objects with a text";

struct DocumentsVisitor;

impl<'de> Visitor<'de> for DocumentsVisitor {
    type Value = Documents;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FORMS)
    }

    fn visit_str<E>(self, text: &str) -> Result<Documents, E> {
        Ok(Documents(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Documents, A::Error> {
        let (mut all, mut count) = (Vec::new(), 0);
        while let Some(Document(text)) = list.next_element()? {
            count += 1;
            if count <= MAX_INPUTS {
                all.push(text);
            }
        }
        if count > MAX_INPUTS {
            return Err(A::Error::custom(format!("may hold at most {MAX_INPUTS} texts, got {count}")));
        }
        Ok(Documents(all))
    }
}

impl<'de> Deserialize<'de> for Documents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentsVisitor)
    }
}

impl JsonSchema for Documents {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Documents".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let object = json_schema!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
        let item = json_schema!({"anyOf": [{"type": "string"}, object]});
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": item, "maxItems": MAX_INPUTS}]})
    }
}

/// One document of a list.
struct Document(String);

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{OF_PARENT}hold strings, or objects with a text")
    }

    fn visit_str<E>(self, text: &str) -> Result<Document, E> {
        Ok(Document(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        let mut text = None;
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if key == "text" {
                text = Some(map.next_value::<String>()?);
            } else {
                map.next_value::<serde::de::IgnoredAny>()?;
            }
        }
        text.map(Document).ok_or_else(|| A::Error::missing_field("text"))
    }
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentVisitor)
    }
}

//! Request bodies as structs: what serde parses is what the OpenAPI document shows.
//!
//! # Layout
//! - [`body`]: parses a body into structs and collects the fields that none of them knows, at every level.
//! - [`explain`]: turns serde's errors into one sentence that names the field. [`numbers`], [`values`]: integers with a
//!   range, objects, names and other values whose errors and schemas serde does not give.
//! - [`sampling`]: the fields that all generating endpoints share. [`generation`], [`structure`], [`conversation`]: those that some
//!   share. [`chat`], [`completions`], [`tokenize`]: those of one endpoint. [`anthropic`], [`responses`]: those of the other APIs.
//!   [`forms`]: strings that may be something else.
//!
//! Every field is an `Option`: `null` and absence are the same, and required fields are checked by whoever needs them, who
//! says it in the words of the API. Structs derive `Deserialize` without `flatten` and `untagged`, which would lose the
//! paths of errors and of unknown fields.

pub mod anthropic;
pub mod body;
pub mod chat;
pub mod completions;
pub mod conversation;
mod explain;
pub mod forms;
pub mod generation;
pub mod numbers;
pub mod responses;
pub mod sampling;
pub mod structure;
pub mod tokenize;
pub mod values;

pub use body::Body;

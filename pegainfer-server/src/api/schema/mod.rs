//! Request bodies as structs. The OpenAPI document shows the same structs that serde parses.
//!
//! # Layout
//! - [`body`]: parses a body into structs and collects the unknown fields at every level.
//! - [`explain`]: turns serde's errors into one sentence that names the field. [`numbers`], [`values`]: integers with a
//!   range, objects, names and other values with their own errors and schemas.
//! - [`sampling`]: fields of all generating endpoints. [`generation`], [`structure`], [`conversation`]: fields of
//!   several endpoints. [`chat`], [`completions`], [`token_in_out`], [`tokenize`], [`adapters`]: fields of one
//!   endpoint. [`anthropic`], [`responses`]: fields of the other APIs. [`forms`], [`keep_alive`]: strings that may be
//!   something else.
//!
//! Every field is an `Option`: `null` and absence are the same. Required fields are checked where they are used, with
//! an error in the terms of the API. Structs derive `Deserialize` without `flatten` and `untagged`, which would lose
//! the paths of errors and of unknown fields.

pub mod adapters;
pub mod anthropic;
pub mod body;
pub mod chat;
pub mod completions;
pub mod conversation;
mod explain;
pub mod forms;
pub mod generation;
pub mod keep_alive;
pub mod numbers;
pub mod responses;
pub mod sampling;
pub mod structure;
pub mod token_in_out;
pub mod tokenize;
pub mod values;
pub mod vectors;

pub use body::Body;

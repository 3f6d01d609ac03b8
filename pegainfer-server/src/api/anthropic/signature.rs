//! Signatures of thinking blocks. Every block has one, because clients and gateways drop blocks without a signature,
//! and with them the reasoning and the cached prefix.
//!
//! If the client sees the reasoning, the signature is a digest of it. Otherwise the signature contains the reasoning
//! itself, so that it returns with the next turn. Signatures are neither secret nor checked: a client may send any
//! reasoning.

use crate::api::schema::Body;
use crate::api::schema::anthropic::ThinkingDisplay;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as STANDARD;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};

/// Beginning of the signature of omitted reasoning, before the reasoning in Base64.
const OMITTED: &str = "pegainfer-1-";
/// Beginning of the signature of shown reasoning, before its SHA-256 in Base64.
const SHOWN: &str = "pegainfer-sha256-";

/// The value of `thinking.display`. Undocumented values are reported.
pub fn display(value: Option<&str>, body: &mut Body<'_>) -> ThinkingDisplay {
    let Some(value) = value else { return ThinkingDisplay::Summarized };
    ThinkingDisplay::deserialize(StrDeserializer::<Error>::new(value)).unwrap_or_else(|_| {
        body.ignore("thinking.display".into());
        ThinkingDisplay::Summarized
    })
}

/// The signature of a thinking block that is sent without its text.
pub fn for_omitted(reasoning: &str) -> String {
    OMITTED.to_owned() + &STANDARD.encode(reasoning)
}

/// The signature of a thinking block that is sent with its text.
pub fn for_shown(reasoning: &str) -> String {
    SHOWN.to_owned() + &STANDARD.encode(digest(&SHA256, reasoning.as_bytes()))
}

/// The reasoning of a returned thinking block: its text, or the content of its signature.
pub fn reasoning(text: Option<String>, signature: Option<String>) -> String {
    let text = text.unwrap_or_default();
    if !text.is_empty() {
        return text;
    }
    let encoded = signature.as_deref().and_then(|signature| signature.strip_prefix(OMITTED)).unwrap_or_default();
    // Signatures of other servers contain no reasoning for us.
    STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_the_reasoning() {
        let text = "Hm, so.\né 日";
        assert_eq!(reasoning(Some(String::new()), Some(for_omitted(text))), text);
        assert_eq!(reasoning(None, Some(for_omitted(text))), text);
        assert_eq!(reasoning(Some("shown".into()), Some(for_omitted(text))), "shown");
        assert_eq!(reasoning(Some("shown".into()), Some(for_shown("shown"))), "shown");
        assert_eq!(reasoning(None, Some(for_shown(text))), "", "a digest does not hold the reasoning");
        assert_ne!(for_shown(text), for_shown("Hm, so."));
        for foreign in ["", "EqQBCkYIAxgC", "pegainfer-1-!", "pegainfer-1-/w==", "pegainfer-1-"] {
            assert_eq!(reasoning(None, Some(foreign.into())), "", "{foreign}");
        }
    }
}

//! Signatures of thinking blocks: reasoning that the client does not want to see, so that it comes back with the next turn.

use crate::api::schema::Body;
use crate::api::schema::anthropic::ThinkingDisplay;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as STANDARD;
use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};

/// Beginning of a signature of this server's. What follows is the reasoning in Base64.
const PREFIX: &str = "pegainfer-1-";

/// The value of `thinking.display`. Those that Anthropic's documentation does not have are reported.
pub fn display(value: Option<&str>, body: &mut Body<'_>) -> ThinkingDisplay {
    let Some(value) = value else { return ThinkingDisplay::Summarized };
    ThinkingDisplay::deserialize(StrDeserializer::<Error>::new(value)).unwrap_or_else(|_| {
        body.ignore("thinking.display".into());
        ThinkingDisplay::Summarized
    })
}

/// The signature of a thinking block that is sent without its text.
pub fn of(reasoning: &str) -> String {
    PREFIX.to_owned() + &STANDARD.encode(reasoning)
}

/// The reasoning of a thinking block that comes back: its text, else what its signature holds.
pub fn reasoning(text: Option<String>, signature: Option<String>) -> String {
    let text = text.unwrap_or_default();
    if !text.is_empty() {
        return text;
    }
    let encoded = signature.as_deref().and_then(|signature| signature.strip_prefix(PREFIX)).unwrap_or_default();
    // Others' signatures say nothing here.
    STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_the_reasoning() {
        let text = "Hm, so.\né 日";
        assert_eq!(reasoning(Some(String::new()), Some(of(text))), text);
        assert_eq!(reasoning(None, Some(of(text))), text);
        assert_eq!(reasoning(Some("shown".into()), Some(of(text))), "shown");
        for foreign in ["", "EqQBCkYIAxgC", "pegainfer-1-!", "pegainfer-1-/w==", "pegainfer-1-"] {
            assert_eq!(reasoning(None, Some(foreign.into())), "", "{foreign}");
        }
    }
}

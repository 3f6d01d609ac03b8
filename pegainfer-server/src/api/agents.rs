//! Coding agents whose prompts contain parts that change with every request. Leaving these out lets the prefix cache
//! find the rest.

use axum::http::{HeaderMap, header};

/// A client with volatile parts in its prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// Claude Code.
    ClaudeCode,
    /// Any other client; its prompts stay as they are.
    Other,
}

impl Client {
    /// The client of these headers; [`Client::Other`] unless volatile parts are to be left out.
    pub fn from_headers(headers: &HeaderMap, normalize: bool) -> Self {
        let agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if normalize && agent.starts_with("claude-cli/") { Self::ClaudeCode } else { Self::Other }
    }
}

/// True if a block of the system prompt only identifies the conversation. Claude Code's contains digits that differ for
/// each conversation, and precedes everything else.
pub fn is_volatile(block: &str, client: Client) -> bool {
    client == Client::ClaudeCode && block.starts_with("x-anthropic-billing-header:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_known_client_loses_its_billing_block() {
        let mut headers = HeaderMap::new();
        let block = "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=sdk-cli;";
        assert!(!is_volatile(block, Client::from_headers(&headers, true)));
        headers.insert(header::USER_AGENT, "claude-cli/2.1.330 (external, sdk-cli)".parse().unwrap());
        assert!(is_volatile(block, Client::from_headers(&headers, true)));
        assert!(!is_volatile(block, Client::from_headers(&headers, false)));
        assert!(!is_volatile("You are helpful.", Client::from_headers(&headers, true)));
    }
}

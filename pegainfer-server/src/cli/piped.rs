//! Text from a pipe.

use anyhow::{Context, Result, ensure};
use std::io::{IsTerminal, Read};

/// Maximum bytes of a text.
const MAX_PIPED: u64 = 8 << 20;

/// The text on standard input, without line breaks at its end. `missing` says what to do where there is none.
pub(super) fn standard_input(missing: &str) -> Result<String> {
    ensure!(!std::io::stdin().is_terminal(), "{missing}");
    let mut bytes = Vec::new();
    std::io::stdin().take(MAX_PIPED + 1).read_to_end(&mut bytes).context("standard input cannot be read")?;
    ensure!(bytes.len() as u64 <= MAX_PIPED, "standard input has more than {MAX_PIPED} bytes");
    let text = String::from_utf8(bytes).context("standard input is not UTF-8")?;
    ensure!(!text.trim().is_empty(), "standard input is empty: {missing}");
    Ok(text.trim_end().to_owned())
}

//! Parses the steps of `ledger --steps`.

use pegainfer_core::ledger::Rows;

/// A step of `--steps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepArg(pub Rows);

/// Parses `decode:SEQUENCES:CONTEXT`, `prefill:TOKENS` or `prefill:TOKENS:CONTEXT`. The context includes the tokens.
pub fn parse_step(text: &str) -> Result<StepArg, String> {
    let mut parts = text.trim().split(':');
    let kind = parts.next().unwrap_or_default();
    let numbers: Option<Vec<usize>> = parts.map(|part| part.parse().ok().filter(|number| *number > 0)).collect();
    let rows = match (kind, numbers.as_deref()) {
        ("decode", Some(&[sequences, context])) => vec![(1, context); sequences],
        ("prefill", Some(&[tokens])) if tokens > 1 => vec![(tokens, tokens)],
        ("prefill", Some(&[tokens, context])) if tokens > 1 && context >= tokens => vec![(tokens, context)],
        _ => return Err(format!("{text:?} is not a step such as decode:8:1023 or prefill:4096")),
    };
    Ok(StepArg(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_and_others_refused() {
        let rows = |text: &str| parse_step(text).map(|step| step.0);
        assert_eq!(rows("decode:2:1023"), Ok(vec![(1, 1023); 2]));
        assert_eq!(rows("prefill:512"), Ok(vec![(512, 512)]));
        assert_eq!(rows("prefill:512:4096"), Ok(vec![(512, 4096)]));
        for text in ["", "decode", "decode:8", "decode:0:5", "prefill:1", "prefill:512:100", "prefill:a", "mixed:1:2"] {
            assert!(rows(text).unwrap_err().contains("decode:8:1023"), "{text}");
        }
    }
}

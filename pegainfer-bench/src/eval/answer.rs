//! Numbers in answers to word problems.

/// The final number of an answer: the last one after `####` if there is one, otherwise the last one of the text.
pub(super) fn final_number(text: &str) -> Option<String> {
    text.rsplit_once("####").and_then(|(_, end)| numbers(end).next()).or_else(|| numbers(text).last())
}

/// The numbers of a text in a normal form: `-1,234.50` is `-1234.5`.
fn numbers(text: &str) -> impl Iterator<Item = String> {
    let is_part = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let mut at = 0;
    std::iter::from_fn(move || {
        let first = at + text[at..].find(|c: char| c.is_ascii_digit())?;
        let end = first + text[first..].find(|c: char| !is_part(c)).unwrap_or(text.len() - first);
        at = end;
        // A minus belongs to a number that follows no word or number: "-5", not "3-5".
        let before = text[..first].strip_suffix(['-', '−']).or_else(|| text[..first].strip_suffix("-$"));
        let negative = before.is_some_and(|before| !before.ends_with(|c: char| c.is_alphanumeric()));
        let number = normalized(&text[first..end]);
        Some(if negative && number != "0" { format!("-{number}") } else { number })
    })
}

/// Digits without thousands separators, redundant zeros, and the full stop of a sentence.
fn normalized(digits: &str) -> String {
    let digits: String = digits.trim_end_matches(['.', ',']).chars().filter(|c| *c != ',').collect();
    let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    let whole = if whole.is_empty() { "0" } else { whole };
    if fraction.is_empty() { whole.to_owned() } else { format!("{whole}.{fraction}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_counts_in_any_notation() {
        for (text, expected) in [
            ("3 + 4 = 7\n#### 7", Some("7")),
            ("#### 1,234.50 dollars, not 5", Some("1234.5")),
            ("It costs $1,000.", Some("1000")),
            ("So x = -05.0!", Some("-5")),
            ("10-3 = 7, or 3-5", Some("5")),
            ("a loss of -$20", Some("-20")),
            ("#### none, but 12 before", Some("12")),
            ("**0.50**", Some("0.5")),
            ("-0", Some("0")),
            ("no number", None),
            ("", None),
        ] {
            assert_eq!(final_number(text).as_deref(), expected, "{text}");
        }
    }
}

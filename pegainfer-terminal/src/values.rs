//! Values of flags and headers: fractions, sizes and times.

use crate::printable::{is_control, truncate_for_error};
use std::time::Duration;

/// Parses a model's name, which appears in the log, in `/metrics` and on clients' terminals.
pub fn parse_name(text: &str) -> Result<String, String> {
    match text.contains(is_control) || text.is_empty() {
        true => Err(format!("{text:?} is not a name: it is empty or has control characters")),
        false => Ok(text.to_owned()),
    }
}

/// Parses a fraction above 0 and at most 1.
pub fn parse_fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|fraction| *fraction > 0.0 && *fraction <= 1.0);
    fraction.ok_or_else(|| format!("{text:?} is not a fraction such as 0.9, above 0 and at most 1"))
}

/// Parses a size in bytes: digits, an optional fraction, an optional suffix.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let unit: f64 = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "ki" | "kib" => 1024.0,
        "m" | "mi" | "mib" => 1024f64.powi(2),
        "g" | "gi" | "gib" => 1024f64.powi(3),
        "t" | "ti" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(format!("unknown unit {suffix:?}: use K, M, G, T, KB, MB, GB or TB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a size such as 512M or 4G"))?;
    let bytes = number * unit;
    if bytes < 1.0 || bytes >= u64::MAX as f64 {
        return Err(format!("{text:?} is out of range"));
    }
    Ok(bytes as u64)
}

/// Like [`parse_bytes`], but also accepts 0.
pub fn parse_bytes_or_none(text: &str) -> Result<u64, String> {
    if text.trim() == "0" { Ok(0) } else { parse_bytes(text) }
}

/// Like [`parse_bytes`], but a number without a unit counts GiB.
pub fn parse_gib(text: &str) -> Result<u64, String> {
    let is_number = text.trim().ends_with(|last: char| last.is_ascii_digit());
    if is_number { parse_bytes(&format!("{}G", text.trim())) } else { parse_bytes(text) }
}

/// A time with its unit, such as 300ms, 1.5s or 20us.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let scale = match &text[end..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(format!("{text:?} has no unit: write 300ms or 1.5s")),
    };
    match text[..end].trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => {
            Duration::try_from_secs_f64(number * scale).map_err(|e| format!("{text:?}: {e}"))
        }
        _ => Err(format!("{text:?} is not a time above 0")),
    }
}

/// Parses a number of seconds above 0, with an optional fraction; at most a year.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365.0 * 24.0 * 3600.0;
    match text.trim().parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= YEAR => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("{:?} is not a number of seconds, such as 30 or 0.5", truncate_for_error(text))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds() {
        assert_eq!(parse_seconds("2.5"), Ok(Duration::from_millis(2500)));
        for bad in ["", "0", "-1", "1s", "nan", "inf", "1e9"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("1GiB", 1 << 30),
            ("1.5k", 1536),
            ("2GB", 2_000_000_000),
            ("100", 100),
            ("7 mib", 7 << 20),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for (text, bytes) in [("4", 4 << 30), ("0.5", 1 << 29), ("512M", 512 << 20), ("2GB", 2_000_000_000)] {
            assert_eq!(parse_gib(text), Ok(bytes), "{text}");
        }
        for bad in ["", "M", "4X", "-1G", "1..5G", "0", "1e30", "99999999T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        for (text, us) in [("300ms", 300_000), ("1.5s", 1_500_000), ("20us", 20), ("0.5 ms", 500)] {
            assert_eq!(parse_time(text), Ok(Duration::from_micros(us)), "{text}");
        }
        for bad in ["300", "ms", "-1s", "0ms", "1e999s", "3min", "NaNs"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fractions() {
        for (text, good) in [("0.9", true), ("1", true), ("0", false), ("1.01", false), ("90%", false), ("NaN", false)]
        {
            assert_eq!(parse_fraction(text).is_ok(), good, "{text}");
        }
    }
}

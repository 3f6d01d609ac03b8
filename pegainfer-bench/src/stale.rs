//! Ledgers that were measured with other kernels than this program's.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use pegainfer_core::ledger::Header;
use pegainfer_kernels::sources;

/// The date (UTC).
pub fn today() -> Date {
    Timestamp::now().to_zoned(TimeZone::UTC).date()
}

/// A sentence about the age of a stale ledger; `None` if the ledger has this program's kernels.
pub fn warning(header: &Header) -> Option<String> {
    (!sources::is_current(&header.kernels)).then(|| sentence(header.measured.as_deref(), today()))
}

fn sentence(measured: Option<&str>, today: Date) -> String {
    let age = |date: Date| match (today - date).get_days() {
        ..=0 => String::new(),
        1 => " (1 day ago)".to_owned(),
        days => format!(" ({days} days ago)"),
    };
    let when = match measured {
        Some(text) => format!("on {text}{}", text.parse().map_or_else(|_| String::new(), age)),
        None => "at an unknown date".to_owned(),
    };
    format!(
        "the ledger is stale: it was measured {when} with other kernels than this program's; expect times to differ, by an \
         unknown amount; measure again with pegainfer ledger --model-path DIR --out FILE"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_counted_in_days() {
        let at = |text: &str| sentence(Some(text), Date::constant(2026, 11, 29));
        assert!(at("2026-11-26").contains(" measured on 2026-11-26 (3 days ago) with other kernels"));
        assert!(at("2025-11-28").contains(" measured on 2025-11-28 (366 days ago) with"));
        assert!(at("2026-11-28").contains(" (1 day ago) with"));
        // Today's date, a date in the future, and text that is not a date.
        for text in ["2026-11-29", "2026-12-24", "yesterday"] {
            assert!(at(text).contains(&format!(" measured on {text} with other kernels")), "{text}");
        }
        assert!(sentence(None, today()).contains(" measured at an unknown date with other kernels"));
    }
}

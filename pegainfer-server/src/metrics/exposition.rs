//! The two text formats of `/metrics`.

use axum::http::{HeaderMap, header};

/// Content type of OpenMetrics 1.0, which has the registry's units for seconds, bytes and `_total`.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of Prometheus' own text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposition {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus 0.0.4.
    Prometheus,
}

impl Exposition {
    /// The format that a client accepts: OpenMetrics only on request.
    pub fn accepted(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
        let wanted = |range: &str| {
            let (kind, parameters) = range.split_once(';').unwrap_or((range, ""));
            let refused =
                parameters.split(';').any(|p| p.trim().strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0)));
            kind.trim().eq_ignore_ascii_case("application/openmetrics-text") && !refused
        };
        let open = accepted.flat_map(|accept| accept.split(',')).any(wanted);
        if open { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// The value of the header `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => OPEN_METRICS,
            Self::Prometheus => PROMETHEUS,
        }
    }
}

/// Converts OpenMetrics text to Prometheus' own format, where a counter's description also names it with `_total`.
pub(super) fn to_prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + 1024);
    let mut help: Option<(&str, &str)> = None;
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), Some(words)) => help = Some((name, words)),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((name, words)) = help.take() {
                    text += &format!("# HELP {name}{suffix} {words}\n");
                }
                text += &format!("# TYPE {name}{suffix} {kind}\n");
            }
            (Some("#"), ..) => {}
            _ => {
                text += line;
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_for_those_who_ask() {
        let format = |accept: &'static str| {
            Exposition::accepted(&HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]))
        };
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        assert_eq!(format(prometheus), Exposition::OpenMetrics);
        for other in ["text/plain", "*/*", "application/openmetrics-text;q=0, text/plain", ""] {
            assert_eq!(format(other), Exposition::Prometheus, "{other}");
        }
        assert_eq!(Exposition::accepted(&HeaderMap::new()), Exposition::Prometheus);
    }

    #[test]
    fn counters_are_described_under_their_full_name() {
        let open = "# HELP a Things.\n# TYPE a counter\na_total{x=\"# HELP\"} 1\n# HELP b Size.\n# TYPE b gauge\n# UNIT b bytes\nb 2\n# EOF\n";
        let expected = "# HELP a_total Things.\n# TYPE a_total counter\na_total{x=\"# HELP\"} 1\n# HELP b Size.\n# TYPE b gauge\nb 2\n";
        assert_eq!(to_prometheus(open), expected);
    }
}

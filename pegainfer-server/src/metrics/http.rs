//! Counters of HTTP requests and refusals.

use super::buckets::LATENCY;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::time::Duration;

type Labels<const N: usize> = [(&'static str, String); N];

/// Counters of HTTP requests and refusals.
pub(super) struct HttpMetrics {
    requests: Family<Labels<4>, Counter>,
    durations: Family<Labels<2>, Histogram, fn() -> Histogram>,
    refusals: Family<[(&'static str, &'static str); 1], Counter>,
}

impl HttpMetrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(LATENCY.iter().copied())),
            refusals: Family::default(),
        };
        let help = "HTTP requests by method, route, class of the status and status";
        registry.register("http_requests", help, metrics.requests.clone());
        let help = "Time from the head of a request to the end of its response";
        registry.register("http_request_duration_seconds", help, metrics.durations.clone());
        let help = "Requests that got an error, by the error's code";
        registry.register("pegainfer:refused_requests", help, metrics.refusals.clone());
        metrics
    }

    /// Counts a finished request.
    pub fn observe(&self, method: &'static str, path: &str, status: u16, duration: Duration) {
        let handler = handler(path);
        // vLLM's dashboards select `handler` and the class of the status.
        let labels = [
            ("method", method.to_string()),
            ("handler", handler.to_string()),
            ("status", format!("{}xx", status / 100)),
            ("code", status.to_string()),
        ];
        self.requests.get_or_create(&labels).inc();
        let labels = [("method", method.to_string()), ("handler", handler.to_string())];
        self.durations.get_or_create(&labels).observe(duration.as_secs_f64());
    }

    /// Counts a refused request.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&[("reason", reason)]).inc();
    }
}

/// The route as a label. The files of the web UI share one.
fn handler(path: &str) -> &str {
    if path.starts_with("/ui/") { "/ui/*" } else { path }
}

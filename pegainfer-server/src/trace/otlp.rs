//! Traces for an OpenTelemetry collector: OTLP over HTTP, as JSON.

use super::{ERROR, HTTP_STATUS};
use anyhow::{Result, ensure};
use fastrace::collector::{EventRecord, Reporter, SpanRecord};
use serde_json::{Value, json};
use std::time::Duration;
use ureq::Agent;

/// Time limit of one export; spans of a failed export are lost.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Values of OTLP's `SpanKind` enumeration.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
/// Values of OTLP's `StatusCode` enumeration.
const UNSET: u8 = 0;
const FAILED: u8 = 2;
/// Attributes with a number as value.
const NUMBERS: [&str; 6] = ["choice", "engine", "cached_tokens", "accepted_draft_tokens", "total_us", HTTP_STATUS];

/// A collector, such as Jaeger, Tempo or the OpenTelemetry collector.
#[derive(Debug)]
pub struct Otlp {
    url: String,
    agent: Agent,
    failed: bool,
}

impl Otlp {
    /// Sends to `endpoint`, `http://host:port`. OTLP's path is added.
    pub fn new(endpoint: &str) -> Result<Self> {
        // Collectors run on the same machine or network, where TLS can be added.
        ensure!(endpoint.starts_with("http://"), "--otlp-endpoint {endpoint} must begin with http://");
        let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let agent = Agent::config_builder().timeout_global(Some(TIMEOUT)).build().into();
        Ok(Self { url, agent, failed: false })
    }
}

impl Reporter for Otlp {
    fn report(&mut self, spans: Vec<SpanRecord>) {
        let body = request(&spans).to_string();
        let sent = self.agent.post(&self.url).header("content-type", "application/json").send(body);
        let failed = sent.as_ref().err();
        // Warn once each time the collector becomes unavailable, not for each trace.
        if let Some(error) = failed.filter(|_| !self.failed) {
            log::warn!("traces are lost: the collector at {} does not accept them: {error}", self.url);
        }
        self.failed = failed.is_some();
    }
}

/// `ExportTraceServiceRequest` in protobuf's JSON: ids in hexadecimal, 64-bit numbers as strings.
fn request(spans: &[SpanRecord]) -> Value {
    let service = attributes([("service.name", "pegainfer")]);
    let scope = json!({"name": "pegainfer", "version": env!("CARGO_PKG_VERSION")});
    let spans: Vec<Value> = spans.iter().map(span).collect();
    json!({"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [{"scope": scope, "spans": spans}]}]})
}

fn span(span: &SpanRecord) -> Value {
    let is_root = span.properties.iter().any(|(name, _)| name == "request_id");
    let parent = if span.parent_id.0 == 0 { String::new() } else { span.parent_id.to_string() };
    let event = |event: &EventRecord| {
        json!({"name": event.name, "timeUnixNano": event.timestamp_unix_ns.to_string(),
            "attributes": attributes(event.properties.iter().map(|(k, v)| (k.as_ref(), v.as_ref())))})
    };
    json!({
        "traceId": span.trace_id.to_string(), "spanId": span.span_id.to_string(), "parentSpanId": parent,
        "name": span.name, "kind": if is_root { SERVER } else { INTERNAL },
        "startTimeUnixNano": span.begin_time_unix_ns.to_string(),
        "endTimeUnixNano": (span.begin_time_unix_ns + span.duration_ns).to_string(),
        "attributes": attributes(span.properties.iter().map(|(k, v)| (k.as_ref(), v.as_ref()))),
        "status": {"code": if span.properties.iter().any(|(name, _)| name == ERROR) { FAILED } else { UNSET }},
        "events": span.events.iter().map(event).collect::<Vec<Value>>(),
    })
}

fn attributes<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Value> {
    let value = |key: &str, value: &str| match NUMBERS.contains(&key) {
        true => json!({"intValue": value}),
        false => json!({"stringValue": value}),
    };
    pairs.into_iter().map(|(key, text)| json!({"key": key, "value": value(key, text)})).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrace::collector::{SpanId, TraceId};
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;

    #[test]
    fn a_collector_gets_spans_as_otlp_writes_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}/", listener.local_addr().unwrap());
        let collector = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") {
                let start = head.len();
                reader.read_line(&mut head).unwrap();
                let line = head[start..].to_ascii_lowercase();
                length = line.strip_prefix("content-length: ").map_or(length, |n| n.trim().parse().unwrap());
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}").unwrap();
            (head, serde_json::from_slice::<Value>(&body).unwrap())
        });
        let mut otlp = Otlp::new(&endpoint).unwrap();
        otlp.report(vec![SpanRecord {
            trace_id: TraceId(0xabc),
            span_id: SpanId(0x12),
            name: "queue".into(),
            begin_time_unix_ns: 1_795_262_750_123_456_789,
            duration_ns: 11,
            properties: vec![("choice".into(), "0".into()), (ERROR.into(), "500".into())],
            ..SpanRecord::default()
        }]);
        assert!(!otlp.failed);
        let (head, body) = collector.join().unwrap();
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], "00000000000000000000000000000abc");
        assert_eq!((&span["spanId"], &span["parentSpanId"]), (&json!("0000000000000012"), &json!("")));
        assert_eq!(span["endTimeUnixNano"], "1795262750123456800");
        let error = json!({"key": "error.type", "value": {"stringValue": "500"}});
        assert_eq!(span["attributes"], json!([{"key": "choice", "value": {"intValue": "0"}}, error]));
        assert_eq!(span["status"]["code"], 2);
    }
}

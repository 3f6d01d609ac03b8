//! The documents about metrics against a server: its page, the dashboard and the alert rules name only metrics of
//! `/metrics`.

use crate::support::client::{get, post, post_ok};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, wait_until};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const COMPLETIONS: &str = "/v1/completions";
/// Labels of every series of a server.
const COMMON: [&str; 2] = ["model_name", "engine"];
/// Labels that Prometheus adds.
const ADDED: [&str; 2] = ["job", "instance"];
/// The series that Prometheus itself keeps for each server.
const UP: &str = "up";
/// The series that only a server with adapters has (tests/models/lora.rs).
const OF_ADAPTERS: &str = "vllm:lora_requests_info";
/// The series that only a server with KV events has (tests/process/kv_events.rs).
const OF_KV_EVENTS: [&str; 3] = [
    "pegainfer:kv_event_batches_total",
    "pegainfer:kv_event_batches_missed_total",
    "pegainfer:kv_event_restarts_total",
];
/// Words of PromQL that are not followed by a bracket.
const OPERATORS: [&str; 4] = ["and", "or", "unless", "bool"];

/// Type and own labels of the series, by name.
type Series = BTreeMap<String, (String, BTreeSet<String>)>;

fn document(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// A server with at least one event for every series.
fn server() -> TestServer {
    let (engine, control) = MockEngine::replying(" a cat");
    control.allow(0);
    let server = TestServer::start(engine.with_tiers(), Setup { max_queued: 1, ..Setup::default() });
    // A labelled series exists from its first event on: here, a request that does not fit into the queue.
    assert_eq!(post(server.address, COMPLETIONS, &json!({"prompt": ["x", "y"]})).status, 503);
    server.wait_idle();
    control.allow(usize::MAX);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    server.wait_idle();
    server
}

/// Names and values of the labels in `a="b",c=~"d"`.
fn labels(text: &str) -> Vec<(&str, &str)> {
    let mut words = text.split('"');
    let mut labels = Vec::new();
    while let (Some(name), Some(value)) = (words.next(), words.next()) {
        labels.push((name.trim_start_matches([',', ' ']).trim_end_matches(['=', '~', '!']), value));
    }
    labels
}

/// The histogram with a series of this name.
fn histogram<'a>(name: &'a str, series: &Series) -> Option<&'a str> {
    let base = |suffix: &&str| name.strip_suffix(*suffix).filter(|base| series.contains_key(*base));
    ["_bucket", "_sum", "_count"].iter().find_map(base).filter(|base| series[*base].0 == "histogram")
}

/// The series that a server exposes.
fn exposed(server: &TestServer) -> Series {
    let text = get(server.address, "/metrics").text();
    let mut series = Series::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            series.insert(name.into(), (kind.into(), BTreeSet::new()));
        } else if !line.starts_with('#') {
            let (name, rest) = line.split_once('{').unwrap();
            let kept = |name: &&str| !COMMON.contains(name) && *name != "le";
            let own = labels(rest.split_once('}').unwrap().0).into_iter().map(|(name, _)| name).filter(kept);
            let family = if series.contains_key(name) { name } else { histogram(name, &series).unwrap() }.to_owned();
            series.get_mut(&family).unwrap().1.extend(own.map(str::to_owned));
        }
    }
    series
}

#[test]
fn the_page_lists_every_series_with_type_and_labels() {
    let names_in = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let page = document("docs/operations/metrics.md");
    let mut documented = Series::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [name, kind, labels, meaning, ""] = cells[..] else { panic!("{row} has not four cells") };
        assert!(!meaning.is_empty(), "{name} has no meaning");
        let entry = (kind.to_owned(), names_in(labels).into_iter().collect());
        assert!(documented.insert(name.trim_end_matches('`').to_owned(), entry).is_none(), "{name} is listed twice");
    }
    [OF_ADAPTERS].iter().chain(&OF_KV_EVENTS).for_each(|name| drop(documented.remove(*name).unwrap()));
    let server = server();
    wait_until("all series are there", || exposed(&server).len() >= documented.len());
    assert_eq!(exposed(&server), documented);
}

/// A series name in a query, with the labels that it selects or groups by.
struct Selector {
    name: String,
    labels: Vec<String>,
}

/// The series names in a PromQL expression with their labels. Every name is assumed to have all labels of the
/// groupings.
fn selectors(expr: &str) -> Vec<Selector> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let list = |text: &str| text.split(',').map(|label| label.trim().to_owned()).collect::<Vec<_>>();
    let (mut found, mut groupings): (Vec<Selector>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = expr;
    while let Some(at) = rest.find(|c: char| is_word(c) || c == '[') {
        rest = &rest[at..];
        if let Some(range) = rest.strip_prefix('[') {
            rest = range.split_once(']').unwrap().1;
            continue;
        }
        let (word, after) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        rest = after;
        let next = after.trim_start();
        if word == "by" {
            let (inside, after) = next.strip_prefix('(').unwrap().split_once(')').unwrap();
            groupings.extend(list(inside).into_iter().filter(|label| label != "le"));
            rest = after;
        } else if word.starts_with(|c: char| c.is_ascii_digit()) {
            rest = after.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
        } else if let Some(inside) = after.strip_prefix('{') {
            let (inside, after) = inside.split_once('}').unwrap();
            let asked = labels(inside).into_iter().map(|(name, _)| name.to_owned());
            found.push(Selector { name: word.into(), labels: asked.collect() });
            rest = after;
        } else if !next.starts_with('(') && !OPERATORS.contains(&word) && !next.starts_with("by ") {
            found.push(Selector { name: word.into(), labels: Vec::new() });
        }
    }
    found.iter_mut().for_each(|selector| selector.labels.extend(groupings.iter().cloned()));
    found
}

/// Fails if a query names a series, a histogram suffix or a label that no server has.
fn check(source: &str, expr: &str, series: &Series) {
    let found = selectors(expr);
    assert!(!found.is_empty(), "{source}: {expr} names no series");
    for Selector { name, labels } in found {
        let own = match (series.get(&name), histogram(&name, series)) {
            (Some((kind, own)), _) if kind != "histogram" => own.clone(),
            (None, Some(histogram)) => series[histogram].1.clone(),
            _ if name == UP => BTreeSet::new(),
            _ => panic!("{source}: {expr} names {name}, which no server exposes"),
        };
        for label in labels {
            let known = own.contains(&label) || COMMON.contains(&label.as_str()) || ADDED.contains(&label.as_str());
            assert!(known, "{source}: {expr} asks for the label {label}, which {name} does not have");
        }
    }
}

/// All texts under this key in a JSON document.
fn texts<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(key).and_then(Value::as_str));
            map.values().for_each(|value| texts(value, key, found));
        }
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        _ => {}
    }
}

#[test]
fn queries_name_series_and_labels_that_exist() {
    let series = exposed(&server());
    let dashboard: Value = serde_json::from_str(&document("tools/deploy/grafana-dashboard.json")).unwrap();
    let mut queries = Vec::new();
    texts(&dashboard["panels"], "expr", &mut queries);
    assert!(queries.len() > 30, "only {} queries are found in the dashboard", queries.len());
    queries.iter().for_each(|query| check("dashboard", query, &series));
    let mut variables = Vec::new();
    texts(&dashboard["templating"], "definition", &mut variables);
    for variable in &variables {
        let (selector, label) =
            variable.strip_prefix("label_values(").unwrap().trim_end_matches(')').rsplit_once(", ").unwrap();
        check("variable", &format!("sum by ({label}) ({selector})"), &series);
    }
    let rules = document("tools/deploy/prometheus-alerts.yaml");
    let exprs: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    assert_eq!(exprs.len(), rules.matches("- alert: ").count());
    exprs.iter().for_each(|expr| check("alert", expr, &series));
}

#[test]
fn a_query_of_an_unknown_series_or_label_is_found() {
    let own = BTreeSet::from(["reason".to_owned()]);
    let series = Series::from([
        ("a_total".to_owned(), ("counter".to_owned(), own)),
        ("h".to_owned(), ("histogram".to_owned(), BTreeSet::new())),
    ]);
    let fails = |expr: &str| std::panic::catch_unwind(|| check("test", expr, &series)).is_err();
    for known in [
        r#"sum by (reason) (rate(a_total{reason!="x",job="y"}[5m])) > 0.05"#,
        "histogram_quantile(0.95, sum by (instance, le) (rate(h_bucket[5m]))) / h_count and up == 0",
    ] {
        assert!(!fails(known), "{known}");
    }
    for unknown in
        ["rate(b_total[5m])", r#"a_total{route="x"}"#, "sum by (route) (a_total)", "h", "a_total_sum", "1 > 0"]
    {
        assert!(fails(unknown), "{unknown}");
    }
}

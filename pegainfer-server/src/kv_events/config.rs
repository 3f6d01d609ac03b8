//! `--kv-events-config`: vLLM's JSON object.

use super::event::Layout;
use crate::zmtp::Endpoint;
use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// Whether and where KV events are published. The fields are those of vLLM's `KVEventsConfig`, and `layout`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Fields {
    enable_kv_cache_events: Option<bool>,
    publisher: Option<PublisherKind>,
    #[serde(default = "default_endpoint", deserialize_with = "endpoint")]
    endpoint: Endpoint,
    #[serde(default, deserialize_with = "optional_endpoint")]
    replay_endpoint: Option<Endpoint>,
    #[serde(default = "default_buffer_steps")]
    buffer_steps: u32,
    #[serde(default = "default_queue")]
    hwm: u32,
    #[serde(default = "default_queue")]
    max_queue_size: u32,
    #[serde(default)]
    topic: String,
    #[serde(default)]
    layout: Layout,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PublisherKind {
    Zmq,
    Null,
}

/// Where and how the KV events of a model are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where subscribers connect, or what the publisher connects to.
    pub endpoint: Endpoint,
    /// Where subscribers ask for earlier batches; `None` if nobody can.
    pub replay_endpoint: Option<Endpoint>,
    /// Maximum number of batches of a sequence; subscribers can ask for all of them.
    pub buffer_steps: u32,
    /// Maximum number of batches that wait for a slow subscriber; 0 is no limit but that of their memory.
    pub hwm: u32,
    /// Maximum number of blocks whose changes wait for the publisher.
    pub max_queue_size: u32,
    /// First frame of every message.
    pub topic: String,
    /// How events are encoded.
    pub layout: Layout,
}

fn default_endpoint() -> Endpoint {
    "tcp://*:5557".parse().expect("the default is an endpoint")
}

fn default_buffer_steps() -> u32 {
    10_000
}

fn default_queue() -> u32 {
    100_000
}

fn endpoint<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Endpoint, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

fn optional_endpoint<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Endpoint>, D::Error> {
    Option::<String>::deserialize(deserializer)?.map(|text| text.parse().map_err(D::Error::custom)).transpose()
}

/// Longest topic, in bytes: the frame of a subscription has to hold it.
const MAX_TOPIC: usize = 1024;

/// Value of the flag: events that are published, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEventsFlag {
    /// Nothing is published.
    Off,
    /// Events are published.
    On(KvEventsConfig),
}

/// Parses the flag's JSON.
pub fn parse(text: &str) -> Result<KvEventsFlag, String> {
    let fields: Fields = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let enabled = match (fields.enable_kv_cache_events, fields.publisher) {
        (Some(false), _) | (_, Some(PublisherKind::Null)) => false,
        (Some(true), _) => true,
        // vLLM publishes nothing then, and says nothing either.
        (None, _) => return Err("set enable_kv_cache_events to true, or to false to publish nothing".to_owned()),
    };
    if fields.buffer_steps == 0 || fields.max_queue_size == 0 {
        return Err("buffer_steps and max_queue_size must be at least 1".to_owned());
    }
    if fields.topic.len() > MAX_TOPIC {
        return Err(format!("topic is longer than {MAX_TOPIC} bytes"));
    }
    if let Some(replay) = fields.replay_endpoint.as_ref().filter(|replay| !replay.can_be_bound()) {
        return Err(format!("replay_endpoint {replay} has a name: give an address of this machine, or *"));
    }
    if !enabled {
        return Ok(KvEventsFlag::Off);
    }
    Ok(KvEventsFlag::On(KvEventsConfig {
        endpoint: fields.endpoint,
        replay_endpoint: fields.replay_endpoint,
        buffer_steps: fields.buffer_steps,
        hwm: fields.hwm,
        max_queue_size: fields.max_queue_size,
        topic: fields.topic,
        layout: fields.layout,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(text: &str) -> KvEventsConfig {
        match parse(text) {
            Ok(KvEventsFlag::On(config)) => config,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_vllm() {
        let config = on(r#"{"enable_kv_cache_events": true}"#);
        assert_eq!((config.endpoint.to_string(), config.replay_endpoint), ("tcp://*:5557".to_owned(), None));
        assert_eq!((config.buffer_steps, config.hwm, config.max_queue_size), (10_000, 100_000, 100_000));
        assert_eq!((config.topic, config.layout), (String::new(), Layout::Map));
    }

    #[test]
    fn all_fields_are_read() {
        let config = on(r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://indexer:7000",
            "replay_endpoint": "tcp://*:7001", "buffer_steps": 3, "hwm": 4, "max_queue_size": 5,
            "topic": "kv@pod@model", "layout": "array"}"#);
        let replay = config.replay_endpoint.map(|endpoint| endpoint.to_string());
        assert_eq!(
            (config.endpoint.to_string(), replay.as_deref()),
            ("tcp://indexer:7000".to_owned(), Some("tcp://*:7001"))
        );
        assert_eq!((config.buffer_steps, config.hwm, config.max_queue_size), (3, 4, 5));
        assert_eq!((&config.topic[..], config.layout), ("kv@pod@model", Layout::Array));
    }

    #[test]
    fn events_can_be_off() {
        for text in [
            r#"{"enable_kv_cache_events": false, "endpoint": "tcp://*:1"}"#,
            r#"{"enable_kv_cache_events": true, "publisher": "null"}"#,
            r#"{"publisher": "null"}"#,
        ] {
            assert_eq!(parse(text), Ok(KvEventsFlag::Off), "{text}");
        }
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        let on = |rest: &str| format!(r#"{{"enable_kv_cache_events": true, {rest}}}"#);
        for (text, expected) in [
            ("{}".to_owned(), "enable_kv_cache_events"),
            (r#"{"publisher": "zmq"}"#.to_owned(), "enable_kv_cache_events"),
            (on(r#""publishers": "zmq""#), "publishers"),
            (on(r#""publisher": "nats""#), "`nats`"),
            (on(r#""endpoint": "ipc:///tmp/x""#), "ipc:///tmp/x"),
            (on(r#""endpoint": 5557"#), "5557"),
            (on(r#""replay_endpoint": "x""#), "is not an endpoint"),
            (on(r#""replay_endpoint": "tcp://router:1""#), "replay_endpoint"),
            (on(r#""buffer_steps": 0"#), "buffer_steps"),
            (on(r#""hwm": -1"#), "-1"),
            (on(r#""layout": "list""#), "`list`"),
            ("true".to_owned(), "expected a JSON object"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}

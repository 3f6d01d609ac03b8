//! `--kv-events-config`: what a subscriber reads from the socket of a running server.

use crate::support::client::{get, post_ok, post_with};
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";

pub fn config(more: &Value) -> String {
    let mut config = json!({
        "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0",
        "topic": "kv@test",
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config.to_string()
}

pub fn serve(more: &Value, flags: &[&str]) -> Process {
    let mut command = pegainfer();
    command.args(["serve", "--device", "cpu", "--threads", "2", "--kv-events-config", &config(more)]);
    Process::start(command.args(flags))
}

/// Address in an endpoint of `/kv_event_sources`, of which only the port matters here.
fn connect(endpoint: &Value) -> TcpStream {
    let port = endpoint.as_str().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// The end of a ZeroMQ connection that a router has.
struct Peer(TcpStream);

impl Peer {
    fn open(endpoint: &Value, socket_type: &str) -> Self {
        let mut stream = connect(endpoint);
        let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
        hello.extend(b"NULL");
        hello.resize(64, 0);
        let size = socket_type.len() as u8;
        hello.extend([4, 22 + size]);
        hello.extend(b"\x05READY\x0bSocket-Type\0\0\0");
        hello.push(size);
        hello.extend(socket_type.as_bytes());
        stream.write_all(&hello).unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        let mut peer = Self(stream);
        peer.frame();
        peer
    }

    /// The next frame, and true if more frames of its message follow.
    fn frame(&mut self) -> (Vec<u8>, bool) {
        let mut flags = [0];
        self.0.read_exact(&mut flags).unwrap();
        let mut size = [0; 8];
        let from = if flags[0] & 2 == 0 { 7 } else { 0 };
        self.0.read_exact(&mut size[from..]).unwrap();
        let mut body = vec![0; u64::from_be_bytes(size) as usize];
        self.0.read_exact(&mut body).unwrap();
        (body, flags[0] & 1 == 1)
    }

    fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let (body, more) = self.frame();
            frames.push(body);
            if !more {
                return frames;
            }
        }
    }
}

/// What a router knows of an engine.
#[derive(Default)]
pub struct Known {
    next: u64,
    rank: u64,
    /// Tokens from the start to the end of each block, by its hash.
    pub blocks: BTreeMap<u64, Vec<u64>>,
    /// Extra keys of each block that has some.
    pub extra_keys: BTreeMap<u64, Value>,
    stored: usize,
}

impl Known {
    /// What the publisher has told so far.
    pub fn replay(source: &Value) -> Self {
        let mut known = Self { rank: source["data_parallel_rank"].as_u64().unwrap(), ..Self::default() };
        let mut peer = Peer::open(&source["replay_endpoint"], "DEALER");
        peer.0.write_all(&[1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        loop {
            let frames = peer.message();
            assert_eq!((frames.len(), &frames[0][..]), (4, &b""[..]));
            if frames[2] == [0xff; 8] {
                return known;
            }
            known.apply(&frames[1..]);
        }
    }

    fn apply(&mut self, message: &[Vec<u8>]) {
        let [topic, sequence, payload] = message else { panic!("{message:?}") };
        assert_eq!(topic, b"kv@test");
        assert_eq!(u64::from_be_bytes(sequence[..].try_into().unwrap()), self.next);
        self.next += 1;
        let batch: Value = rmp_serde::from_slice(payload).unwrap();
        assert_eq!((batch.as_array().unwrap().len(), batch[2].as_u64()), (3, Some(self.rank)));
        for event in batch[1].as_array().unwrap() {
            self.follow(event);
        }
    }

    fn follow(&mut self, event: &Value) {
        let numbers = |value: &Value| -> Vec<u64> {
            value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
        };
        match event["type"].as_str().unwrap() {
            "BlockStored" => {
                let (hashes, tokens) = (numbers(&event["block_hashes"]), numbers(&event["token_ids"]));
                let size = event["block_size"].as_u64().unwrap() as usize;
                assert_eq!(hashes.len() * size, tokens.len());
                let parent = event["parent_block_hash"].as_u64();
                let mut text = parent.map_or(Vec::new(), |parent| self.blocks[&parent].clone());
                for (hash, tokens) in hashes.iter().zip(tokens.chunks(size)) {
                    text.extend(tokens);
                    self.blocks.insert(*hash, text.clone());
                }
                // Text has no such field.
                if let Some(keys) = event.get("extra_keys") {
                    assert_eq!(keys.as_array().unwrap().len(), hashes.len());
                    let keys = hashes.iter().zip(keys.as_array().unwrap()).filter(|(_, keys)| !keys.is_null());
                    self.extra_keys.extend(keys.map(|(hash, keys)| (*hash, keys.clone())));
                    assert!(!self.extra_keys.is_empty(), "{event}");
                }
                self.stored += hashes.len();
            }
            "BlockRemoved" => {
                for hash in numbers(&event["block_hashes"]) {
                    assert!(self.blocks.remove(&hash).is_some());
                    self.extra_keys.remove(&hash);
                }
            }
            "AllBlocksCleared" => {
                self.blocks.clear();
                self.extra_keys.clear();
            }
            other => panic!("{other}"),
        }
    }

    fn has(&self, tokens: &[u64]) -> bool {
        self.blocks.values().any(|text| text == tokens)
    }
}

pub fn sources(server: &Process) -> Vec<Value> {
    get(server.address, "/kv_event_sources").json().as_array().unwrap().clone()
}

#[test]
fn a_router_learns_what_is_cached() {
    let server = serve(&json!({}), &[]);
    let source = &sources(&server)[0];
    assert_eq!((&source["model"], &source["topic"]), (&json!("qwen3-tiny"), &json!("kv@test")));
    let mut subscriber = Peer::open(&source["endpoint"], "SUB");
    subscriber.0.write_all(&[0, 4, 1, b'k', b'v', b'@']).unwrap();
    let mut known = Known::replay(source);
    assert_eq!((known.next, known.blocks.len()), (1, 0), "the first batch clears");
    std::thread::sleep(Duration::from_millis(200));
    let prompt: Vec<u64> = (1..100).collect();
    let turn = |prompt: &[u64]| post_ok(server.address, COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 1}));
    turn(&prompt);
    while !known.has(&prompt[..96]) {
        known.apply(&subscriber.message());
    }
    assert_eq!((known.stored, known.blocks.len()), (6, 6));
    let longer: Vec<u64> = prompt.iter().copied().chain(100..150).collect();
    turn(&longer);
    while !known.has(&longer[..144]) {
        known.apply(&subscriber.message());
    }
    assert_eq!(known.stored, 9, "the second turn stores new blocks only");
    let late = Known::replay(source);
    assert_eq!((late.next, &late.blocks), (known.next, &known.blocks));
    assert!(late.extra_keys.is_empty(), "the prompt has no image");
    let metrics = get(server.address, "/metrics").text();
    let batches = format!("pegainfer:kv_event_batches_total{{model_name=\"qwen3-tiny\",engine=\"0\"}} {}", known.next);
    assert!(metrics.contains(&batches), "{batches}: {metrics}");
    server.signal("-TERM");
    while !known.blocks.is_empty() {
        known.apply(&subscriber.message());
    }
}

#[test]
fn each_engine_has_a_socket() {
    let server = serve(&json!({}), &["--data-parallel-size", "2"]);
    let sources = sources(&server);
    assert_eq!(sources.len(), 2);
    for rank in ["0", "1"] {
        let prompt: Vec<usize> = (0..48).map(|i| i + 1 + rank.parse::<usize>().unwrap()).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1});
        assert_eq!(post_with(server.address, COMPLETIONS, ("X-data-parallel-rank", rank), &body).status, 200);
    }
    std::thread::sleep(Duration::from_millis(200));
    for (rank, source) in (1..).zip(&sources) {
        let known = Known::replay(source);
        assert!(known.blocks.len() == 3 && known.blocks.values().all(|text| text[0] == rank), "{:?}", known.blocks);
    }
}

#[test]
fn a_model_that_is_unloaded_frees_its_ports() {
    let dir = TempDir::new("kv-events-models");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let own = format!(r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}"#);
    let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
    let file = dir.0.join("models.toml");
    std::fs::write(&file, format!("[a]\npath = {models:?}\nkv-events-config = '{own}'\n")).unwrap();
    let mut command = pegainfer();
    let server =
        Process::start(command.args(["serve", "--device", "cpu", "--admin-local", "--models", file.to_str().unwrap()]));
    assert!(sources(&server).is_empty(), "the model is not loaded");
    for _ in 0..2 {
        post_ok(server.address, COMPLETIONS, &json!({"model": "a", "prompt": "x", "max_tokens": 1}));
        let source = &sources(&server)[0];
        assert!(source["endpoint"].as_str().unwrap().ends_with(&format!(":{port}")), "{source}");
        assert_eq!((&source["model"], &source["replay_endpoint"]), (&json!("a"), &Value::Null));
        let mut subscriber = Peer::open(&source["endpoint"], "SUB");
        subscriber.0.write_all(&[0, 1, 1]).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        post_ok(server.address, "/v1/models/a/unload", &json!({}));
        let last: Value = rmp_serde::from_slice(&subscriber.message()[2]).unwrap();
        assert_eq!(last[1], json!([{"type": "AllBlocksCleared"}]));
        assert_eq!(subscriber.0.read(&mut [0]).unwrap(), 0, "the socket is closed");
        assert!(sources(&server).is_empty());
    }
}

#[test]
fn wrong_configurations_are_one_sentence() {
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let in_use = format!("--kv-events-config: port {port} is in use: give another one");
    for (more, code, expected) in [
        (json!({"endpoint": format!("tcp://*:{port}")}), 1, &in_use[..]),
        (json!({"replay_endpoint": format!("tcp://*:{port}")}), 1, &in_use),
        (json!({"endpoint": "ipc:///tmp/kv"}), 2, "\"ipc:///tmp/kv\" is not an endpoint such as tcp://*:5557"),
        (json!({"hmw": 1}), 2, "unknown field `hmw`"),
        (json!({"enable_kv_cache_events": null}), 2, "set enable_kv_cache_events to true"),
    ] {
        let flags = ["serve", "--device", "cpu", "--port", "0", "--kv-events-config", &config(&more)];
        let (status, _, err) = run(pegainfer().args(flags));
        assert_eq!(status, Some(code), "{err}");
        assert!(err.contains(expected), "{err}");
    }
    let dir = TempDir::new("kv-events-dir");
    std::fs::write(dir.0.join("models.toml"), "[a]\n").unwrap();
    let models = dir.0.join("models.toml");
    let flags =
        ["serve", "--port", "0", "--models", models.to_str().unwrap(), "--kv-events-config", &config(&json!({}))];
    let (status, _, err) = run(pegainfer().args(flags));
    assert!(status == Some(1) && err.contains("set it in the table of a model"), "{err}");
}

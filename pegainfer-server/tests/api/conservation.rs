//! Conservation laws of the metrics: tokens counted are tokens sent, and every request is running, waiting or finished.
//!
//! The seed is printed; `PEGAINFER_TEST_SEED=n cargo test -p pegainfer-server --test api conservation` replays it.

use crate::support::client::{get, post, post_unread, post_with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, wait_until};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";
const CLIENTS: u64 = 8;
const REQUESTS: usize = 30;
const RUNNING: usize = 5;
/// `max_tokens` of a request that does not end by itself.
const LONG: u64 = 450;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}

/// Counts of one client.
#[derive(Default, Debug)]
struct Seen {
    submitted: u64,
    finished: u64,
    finished_tokens: u64,
    prompt_tokens: u64,
}

impl Seen {
    fn finish(&mut self, usage: &Value) {
        self.finished += 1;
        self.finished_tokens += usage["completion_tokens"].as_u64().unwrap();
        self.prompt_tokens += usage["prompt_tokens"].as_u64().unwrap();
    }

    fn add(&mut self, other: &Self) {
        self.submitted += other.submitted;
        self.finished += other.finished;
        self.finished_tokens += other.finished_tokens;
        self.prompt_tokens += other.prompt_tokens;
    }
}

/// One request of a random kind.
fn request(address: SocketAddr, rng: &mut Rng, seen: &mut Seen) {
    let prompt: Vec<u64> = (0..1 + rng.below(20)).collect();
    let mut body = json!({"prompt": prompt, "max_tokens": 1 + rng.below(12)});
    seen.submitted += 1;
    match rng.below(6) {
        0 | 1 => seen.finish(&post(address, COMPLETIONS, &body).json()["usage"]),
        2 => {
            body["stop"] = json!([" sat"]);
            seen.finish(&post(address, COMPLETIONS, &body).json()["usage"]);
        }
        3 => {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
            let events = post(address, COMPLETIONS, &body).events();
            let (last, chunks) = events.split_last().unwrap();
            assert_eq!(last["usage"]["completion_tokens"], chunks.len(), "one chunk for each token that is counted");
            seen.finish(&last["usage"]);
        }
        4 => {
            let long = json!({"prompt": prompt, "max_tokens": LONG, "ignore_eos": true, "stream": true});
            let mut response = post(address, COMPLETIONS, &long);
            for _ in 0..rng.below(5) {
                response.chunk();
            }
        }
        _ => {
            let long = json!({"prompt": prompt, "max_tokens": LONG, "ignore_eos": true});
            let response = post_with(address, COMPLETIONS, ("x-request-timeout", "0.02"), &long);
            match response.status {
                200 => seen.finish(&response.json()["usage"]),
                status => assert_eq!(status, 504),
            }
        }
    }
}

/// The sum of a metric over its labels.
fn value(address: SocketAddr, name: &str) -> u64 {
    let text = get(address, "/metrics").text();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(&format!("vllm:{name}{{"))).collect();
    assert!(!lines.is_empty(), "no {name} in {text}");
    let total: f64 = lines.iter().map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
    assert_eq!(total.fract(), 0.0, "{name}");
    total as u64
}

#[test]
fn nothing_is_lost_and_nothing_is_counted_twice() {
    let seed = match std::env::var("PEGAINFER_TEST_SEED") {
        Ok(seed) => seed.parse().expect("PEGAINFER_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PEGAINFER_TEST_SEED={seed}");
    let (engine, control) = MockEngine::replying(" a cat sat on a mat and saw a dog");
    control.allow(0);
    let server = TestServer::start(engine.with_max_num_seqs(RUNNING), Setup::default());
    let address = server.address;
    let mut seen = Seen::default();
    std::thread::scope(|scope| {
        let client = |n| {
            move || {
                let (mut rng, mut seen) = (Rng(seed.wrapping_add(n)), Seen::default());
                (0..REQUESTS).for_each(|_| request(address, &mut rng, &mut seen));
                seen
            }
        };
        let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(client(n))).collect();
        // A steady pace, so that some requests are cut off and some are not.
        while !clients.iter().all(|client| client.is_finished()) {
            control.allowance.fetch_add(20, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        clients.into_iter().for_each(|client| seen.add(&client.join().unwrap()));
    });
    server.wait_idle();
    let over = || value(address, "request_success_total");
    wait_until("every end is counted", || over() == seen.submitted);
    assert_eq!(control.added() as u64, seen.submitted);

    // Some of the requests that clients abandoned may have ended just before.
    let (finished, tokens) = (value(address, "e2e_request_latency_seconds_count"), "request_generation_tokens_sum");
    let unseen = finished - seen.finished;
    assert_eq!(value(address, tokens), seen.finished_tokens + unseen * LONG, "{seen:?}");
    assert!(finished < seen.submitted && finished > seen.submitted / 3, "some are cut off: {seen:?}");
    let generated = value(address, "generation_tokens_total");
    assert_eq!(generated, control.tokens.load(Ordering::SeqCst) as u64);
    let delivered =
        value(address, "time_to_first_token_seconds_count") + value(address, "inter_token_latency_seconds_count");
    assert!(delivered >= seen.finished_tokens && delivered <= generated, "{delivered} of {generated}");
    assert!(value(address, "prompt_tokens_total") >= seen.prompt_tokens);
    for gauge in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        assert_eq!(value(address, gauge), 0, "{gauge}");
    }

    // The sum also holds while requests run and wait.
    control.allow(0);
    let open: Vec<_> = (0..RUNNING + 2).map(|_| post_unread(address, COMPLETIONS, &json!({"prompt": "x"}))).collect();
    wait_until("all are there", || {
        let stats = server.engine.stats();
        (stats.running, stats.waiting) == (RUNNING, 2)
    });
    let (running, waiting) = (value(address, "num_requests_running"), value(address, "num_requests_waiting"));
    assert_eq!((running, waiting), (RUNNING as u64, 2));
    assert_eq!(running + waiting + over(), seen.submitted + open.len() as u64);
}

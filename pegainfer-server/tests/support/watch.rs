//! An ordinary client and a poller of `/health`, next to other load on a server.

use super::client::{get, post_with};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Minimum watching time, for meaningful percentiles.
const WATCHED: Duration = Duration::from_millis(800);

/// 99th percentiles.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    pub ttft: Duration,
    pub itl: Duration,
    pub health: Duration,
}

/// Observations of the ordinary client and the poller.
#[derive(Default)]
pub struct Watched {
    first: Vec<Duration>,
    gaps: Vec<Duration>,
    health: Vec<Duration>,
    /// Statuses other than 200.
    pub refused: Vec<u16>,
}

impl Watched {
    /// The percentiles.
    pub fn figures(&self) -> Figures {
        let [ttft, itl, health] = [&self.first, &self.gaps, &self.health].map(|times| percentile(times));
        Figures { ttft, itl, health }
    }

    /// The time that exceeded its bound, if any.
    pub fn late(&self, ordinary: Figures, slowdown: f64) -> Option<String> {
        let Figures { ttft, itl, health } = self.figures();
        if ttft >= (3 * ordinary.ttft).max(Duration::from_secs(1).mul_f64(slowdown)) {
            return Some(format!("TTFT {ttft:?}, ordinary {:?}", ordinary.ttft));
        }
        if itl >= (3 * ordinary.itl / 2).max(Duration::from_millis(50).mul_f64(slowdown)) {
            return Some(format!("ITL {itl:?}, ordinary {:?}", ordinary.itl));
        }
        let bound = (3 * ordinary.health).max(Duration::from_millis(100).mul_f64(slowdown));
        (health >= bound).then(|| format!("/health took {health:?}, ordinary {:?}", ordinary.health))
    }
}

fn percentile(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get((times.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}

/// Watches the server while `work` runs and for at least [`WATCHED`].
pub fn watch(address: SocketAddr, key: &str, work: impl FnOnce()) -> Watched {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| stream_until(address, key, &stop));
        let poller = scope.spawn(|| poll_until(address, &stop));
        let began = Instant::now();
        // A panic of the attack must not leave the watchers running.
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        std::thread::sleep(WATCHED.saturating_sub(began.elapsed()));
        stop.store(true, Ordering::SeqCst);
        let (first, gaps, refused) = client.join().unwrap();
        let health = poller.join().unwrap();
        if let Err(panic) = worked {
            std::panic::resume_unwind(panic);
        }
        Watched { first, gaps, health, refused }
    })
}

/// An ordinary client: one short stream after another. Returns the times to first token and between tokens, and
/// refusals.
fn stream_until(address: SocketAddr, key: &str, stop: &AtomicBool) -> (Vec<Duration>, Vec<Duration>, Vec<u16>) {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let (mut first, mut gaps, mut refused) = (vec![], vec![], vec![]);
    let authorization = format!("Bearer {key}");
    while !stop.load(Ordering::SeqCst) {
        let began = Instant::now();
        let mut response = post_with(address, "/v1/completions", ("Authorization", &authorization), &body);
        if response.status != 200 {
            refused.push(response.status);
            continue;
        }
        let mut last = None;
        while response.chunk().is_some() {
            let now = Instant::now();
            match last.replace(now) {
                Some(last) => gaps.push(now - last),
                None => first.push(now - began),
            }
        }
    }
    (first, gaps, refused)
}

/// Polls `/health` every 20 ms. Returns the response times.
fn poll_until(address: SocketAddr, stop: &AtomicBool) -> Vec<Duration> {
    let mut times = vec![];
    while !stop.load(Ordering::SeqCst) {
        let began = Instant::now();
        assert_eq!(get(address, "/health").status, 200);
        times.push(began.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    times
}

//! Rates of an API key: token buckets that hold what the key may take in a minute.

use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// What an API key may take in a minute; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// Requests.
    pub requests: Option<NonZeroU32>,
    /// Tokens of prompts and responses together.
    pub tokens: Option<NonZeroU32>,
}

/// A key has taken all that it may.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("this API key may have {most} {what} a minute ({name}={most} on its line of the key file); try again in {} s", self.seconds())]
pub struct RateExceeded {
    /// Name of the rate in the key file.
    pub name: &'static str,
    what: &'static str,
    most: u32,
    wait: Duration,
}

impl RateExceeded {
    /// Whole seconds after which the next request is admitted.
    pub fn seconds(&self) -> u64 {
        self.wait.as_millis().div_ceil(1000).max(1) as u64
    }
}

/// What one API key has taken of its rates.
#[derive(Debug)]
pub struct Meter {
    rates: Rates,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

impl Meter {
    /// The meter of a key that has taken nothing yet.
    pub fn new(rates: Rates) -> Self {
        Self { rates, requests: rates.requests.map(Bucket::full), tokens: rates.tokens.map(Bucket::full) }
    }

    /// The rates of the key.
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// Takes one request, if the key has a request and a token left.
    pub fn request(&self) -> Result<(), RateExceeded> {
        let now = Instant::now();
        let exceeded = |name, what| {
            move |(bucket, wait): (&Bucket, Duration)| RateExceeded { name, what, most: bucket.most, wait }
        };
        let tokens = self.tokens.as_ref().and_then(|bucket| Some((bucket, bucket.wait(now)?)));
        tokens.map(exceeded("tpm", "tokens")).map_or(Ok(()), Err)?;
        let requests = self.requests.as_ref().and_then(|bucket| Some((bucket, bucket.take_one(now)?)));
        requests.map(exceeded("rpm", "requests")).map_or(Ok(()), Err)
    }

    /// Takes tokens, also those that the key does not have: it is then in debt, and its next requests are refused.
    pub fn spend(&self, tokens: usize) {
        if let Some(bucket) = &self.tokens {
            bucket.level(Instant::now()).0 -= tokens as f64;
        }
    }
}

/// A token bucket: it holds at most what may be taken in a minute, and fills at that rate.
#[derive(Debug)]
struct Bucket {
    most: u32,
    /// What may be taken, and when that was so. Below 0, more was taken.
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn full(most: NonZeroU32) -> Self {
        let most = most.get();
        Self { most, level: Mutex::new((f64::from(most), Instant::now())) }
    }

    fn per_second(&self) -> f64 {
        f64::from(self.most) / 60.0
    }

    fn level(&self, now: Instant) -> MutexGuard<'_, (f64, Instant)> {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let filled = now.saturating_duration_since(level.1).as_secs_f64() * self.per_second();
        *level = ((level.0 + filled).min(f64::from(self.most)), now.max(level.1));
        level
    }

    /// The time until one may be taken; `None` if it may be taken now.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let missing = 1.0 - self.level(now).0;
        (missing > 0.0).then(|| Duration::from_secs_f64(missing / self.per_second()))
    }

    /// Takes one, or returns the time until it may be taken.
    fn take_one(&self, now: Instant) -> Option<Duration> {
        let wait = self.wait(now);
        if wait.is_none() {
            self.level(now).0 -= 1.0;
        }
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(most: u32) -> (Bucket, Instant) {
        let bucket = Bucket::full(NonZeroU32::new(most).unwrap());
        let start = bucket.level.lock().unwrap().1;
        (bucket, start)
    }

    #[test]
    fn a_bucket_has_a_minute_s_worth_and_fills_at_its_rate() {
        let (bucket, start) = bucket(30);
        let taken = (0..100).filter(|_| bucket.take_one(start).is_none()).count();
        assert_eq!((taken, bucket.take_one(start)), (30, Some(Duration::from_secs(2))));
        let later = |seconds: f64| start + Duration::from_secs_f64(seconds);
        assert_eq!(bucket.take_one(later(1.0)), Some(Duration::from_secs(1)));
        assert_eq!((bucket.take_one(later(2.0)), bucket.take_one(later(2.0)).is_some()), (None, true));
        let taken = (0..100).filter(|_| bucket.take_one(later(1e6)).is_none()).count();
        assert_eq!(taken, 30, "it holds no more than a minute's worth");
    }

    #[test]
    fn what_was_taken_beyond_the_rate_has_to_be_waited_for() {
        let meter = Meter::new(Rates { tokens: NonZeroU32::new(600), ..Rates::default() });
        assert_eq!(meter.request(), Ok(()));
        meter.spend(599 + 600);
        let exceeded = meter.request().unwrap_err();
        assert_eq!((exceeded.name, exceeded.seconds()), ("tpm", 60));
        let message = exceeded.to_string();
        assert!(
            message.contains("600 tokens a minute (tpm=600 on its line of the key file); try again in 60 s"),
            "{message}"
        );
    }

    #[test]
    fn a_key_without_tokens_left_loses_no_request() {
        let meter = Meter::new(Rates { requests: NonZeroU32::new(1), tokens: NonZeroU32::new(60_000) });
        meter.spend(60_000);
        assert_eq!(meter.request().unwrap_err().name, "tpm");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(meter.request(), Ok(()));
        assert_eq!(meter.request().unwrap_err().name, "rpm");
    }
}

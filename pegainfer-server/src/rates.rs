//! Rate limits of an API key: token buckets that hold a minute's amount.

use crate::rejection::Rejection;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Limits of an API key per minute; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// Requests.
    pub requests: Option<NonZeroU32>,
    /// Prompt and output tokens together.
    pub tokens: Option<NonZeroU32>,
}

/// A key has used up a rate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("this API key may have {limit} {what} a minute ({}={limit} on its line of the key file); try again in {} s", self.rejection.name(), self.seconds())]
pub struct RateExceeded {
    /// The rate, which the key file calls by the same name.
    pub rejection: Rejection,
    what: &'static str,
    limit: u32,
    wait: Duration,
}

impl RateExceeded {
    /// Whole seconds until the next request is admitted.
    pub fn seconds(&self) -> u64 {
        self.wait.as_millis().div_ceil(1000).max(1) as u64
    }
}

/// Usage of one API key, against its rates.
#[derive(Debug)]
pub struct Meter {
    rates: Rates,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

impl Meter {
    /// The meter of an unused key.
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
        let exceeded = |rejection, what| {
            move |(bucket, wait): (&Bucket, Duration)| RateExceeded { rejection, what, limit: bucket.capacity, wait }
        };
        let tokens = self.tokens.as_ref().and_then(|bucket| Some((bucket, bucket.wait(now)?)));
        tokens.map(exceeded(Rejection::Tpm, "tokens")).map_or(Ok(()), Err)?;
        let requests = self.requests.as_ref().and_then(|bucket| Some((bucket, bucket.take_one(now)?)));
        requests.map(exceeded(Rejection::Rpm, "requests")).map_or(Ok(()), Err)
    }

    /// Tokens that each of `n` choices may generate after a prompt of `prompt` tokens if the client set no maximum: an
    /// equal part of the tokens left, at most `max_tokens`. The request is refused if less is left than it needs and
    /// less than a quarter of a minute's tokens, because an answer of a few words helps nobody.
    pub fn remaining(&self, prompt: usize, n: usize, max_tokens: usize) -> Result<usize, RateExceeded> {
        let Some(bucket) = &self.tokens else { return Ok(usize::MAX) };
        let (now, capacity) = (Instant::now(), bucket.capacity as usize);
        let needed = prompt.saturating_add(n.saturating_mul(max_tokens).min(capacity / 4)).min(capacity);
        match bucket.wait_for(needed as f64, now) {
            Some(wait) => Err(self.tokens_exceeded(bucket, wait)),
            None => Ok((bucket.level(now).0 as usize).saturating_sub(prompt) / n.max(1)),
        }
    }

    /// Takes all tokens of a request: its prompts and its maximum output. Tokens that are not generated are given back,
    /// see [`Reservation`].
    pub fn take(&self, asked: usize) -> Result<(), Refused> {
        let Some(bucket) = &self.tokens else { return Ok(()) };
        if asked > bucket.capacity as usize {
            return Err(Refused::TooMany { asked, limit: bucket.capacity });
        }
        let now = Instant::now();
        let mut level = bucket.level(now);
        let missing = asked as f64 - level.0;
        if missing > 0.0 {
            let wait = bucket.time_for(missing);
            return Err(Refused::Exceeded(self.tokens_exceeded(bucket, wait)));
        }
        level.0 -= asked as f64;
        Ok(())
    }

    fn tokens_exceeded(&self, bucket: &Bucket, wait: Duration) -> RateExceeded {
        RateExceeded { rejection: Rejection::Tpm, what: "tokens", limit: bucket.capacity, wait }
    }

    fn give_back(&self, tokens: usize) {
        if let Some(bucket) = &self.tokens {
            bucket.level(Instant::now()).0 += tokens as f64;
        }
    }
}

/// Why the tokens of a request are refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    /// The request exceeds a whole minute's tokens.
    #[error(
        "the request asks for {asked} tokens, its prompt and n times max_tokens, but this API key may have {limit} \
         tokens a minute (tpm={limit} on its line of the key file): ask for fewer"
    )]
    TooMany {
        /// Tokens of the request.
        asked: usize,
        /// Tokens per minute.
        limit: u32,
    },
    /// The request exceeds the tokens left.
    #[error(transparent)]
    Exceeded(RateExceeded),
}

/// Tokens that one choice may still generate. The rest is given back when it ends.
#[derive(Debug)]
pub struct Reservation {
    meter: Arc<Meter>,
    left: usize,
}

impl Reservation {
    /// A part of the tokens that were [taken](Meter::take) from `meter`.
    pub fn new(meter: Arc<Meter>, tokens: usize) -> Self {
        Self { meter, left: tokens }
    }

    /// Keeps all tokens: nothing is given back.
    pub fn keep(mut self) {
        self.left = 0;
    }

    /// Counts one generated token.
    pub fn spend(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.meter.give_back(self.left);
    }
}

/// A token bucket: holds at most a minute's amount and refills at that rate.
#[derive(Debug)]
struct Bucket {
    capacity: u32,
    /// Amount left at a time. Negative after more was taken than there was.
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn full(capacity: NonZeroU32) -> Self {
        let capacity = capacity.get();
        Self { capacity, level: Mutex::new((f64::from(capacity), Instant::now())) }
    }

    fn per_second(&self) -> f64 {
        f64::from(self.capacity) / 60.0
    }

    fn level(&self, now: Instant) -> MutexGuard<'_, (f64, Instant)> {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let filled = now.saturating_duration_since(level.1).as_secs_f64() * self.per_second();
        *level = ((level.0 + filled).min(f64::from(self.capacity)), now.max(level.1));
        level
    }

    /// The time until one may be taken; `None` if it may be taken now.
    fn wait(&self, now: Instant) -> Option<Duration> {
        self.wait_for(1.0, now)
    }

    /// The time until `amount` may be taken; `None` if it may be taken now.
    fn wait_for(&self, amount: f64, now: Instant) -> Option<Duration> {
        let missing = amount - self.level(now).0;
        (missing > 0.0).then(|| self.time_for(missing))
    }

    /// Time in which the bucket gains `amount`.
    fn time_for(&self, amount: f64) -> Duration {
        Duration::from_secs_f64(amount / self.per_second())
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

    fn bucket(capacity: u32) -> (Bucket, Instant) {
        let bucket = Bucket::full(NonZeroU32::new(capacity).unwrap());
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

    fn meter(tokens: u32) -> Arc<Meter> {
        Arc::new(Meter::new(Rates { tokens: NonZeroU32::new(tokens), ..Rates::default() }))
    }

    #[test]
    fn a_request_takes_what_it_asks_for_and_gives_back_what_it_does_not_use() {
        let meter = meter(600);
        assert_eq!(meter.take(100 + 8 * 64), Err(Refused::TooMany { asked: 612, limit: 600 }));
        let message = meter.take(601).unwrap_err().to_string();
        assert!(message.contains("asks for 601 tokens") && message.contains("(tpm=600 on its line"), "{message}");
        meter.take(100 + 400).unwrap();
        let mut choices = [200, 200].map(|tokens| Reservation::new(meter.clone(), tokens));
        (0..150).for_each(|_| choices[0].spend());
        let Err(Refused::Exceeded(exceeded)) = meter.take(400) else { panic!("500 of 600 are taken") };
        assert!(exceeded.rejection == Rejection::Tpm && (29..=30).contains(&exceeded.seconds()), "{exceeded:?}");
        let message = exceeded.to_string();
        assert!(
            message.contains("600 tokens a minute (tpm=600 on its line of the key file); try again in"),
            "{message}"
        );
        drop(choices);
        // The prompt's 100 tokens and 150 generated ones are used up.
        meter.take(350).unwrap();
        assert_eq!(meter.request().unwrap_err().rejection, Rejection::Tpm, "nothing is left");
    }

    #[test]
    fn a_request_that_names_no_number_gets_a_part_of_what_is_left() {
        let meter = meter(600_000);
        assert_eq!(meter.remaining(1000, 1, usize::MAX), Ok(599_000));
        assert_eq!(meter.remaining(1000, 2, usize::MAX), Ok(299_500));
        meter.take(460_000).unwrap();
        assert!(meter.remaining(1000, 1, usize::MAX).is_err(), "less than a quarter is left");
        assert!(meter.remaining(1000, 1, 16).unwrap() > 100_000, "it needs little");
        assert_eq!(Meter::new(Rates::default()).remaining(1000, 1, usize::MAX), Ok(usize::MAX));
    }

    #[test]
    fn a_key_without_tokens_left_loses_no_request() {
        let meter = Meter::new(Rates { requests: NonZeroU32::new(1), tokens: NonZeroU32::new(60_000) });
        meter.take(60_000).unwrap();
        assert_eq!(meter.request().unwrap_err().rejection, Rejection::Tpm);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(meter.request(), Ok(()));
        assert_eq!(meter.request().unwrap_err().rejection, Rejection::Rpm);
    }
}

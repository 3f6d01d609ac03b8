//! Slow drift: detects that steps of one kind have become slower.
//!
//! Each second contributes the median of ln(measured / predicted). The first two minutes are the reference, with their
//! mean and standard deviation sigma. Then two one-sided CUSUMs (Page 1954) sum deviations beyond half a sigma, above
//! and below; one that exceeds 14 sigma means that the level has shifted. A shift of 5 % or more is a drift, and the
//! new level becomes the reference.

use super::load::{StepKind, StepLoad};
use std::fmt;
use std::time::Duration;

/// Length of a bucket, which contributes its median.
const BUCKET: Duration = Duration::from_secs(1);
/// Minimum number of steps in a bucket; one with fewer is extended.
const MIN_STEPS: usize = 5;
/// Maximum number of steps kept per bucket.
const MAX_STEPS: usize = 4096;
/// Buckets of a reference.
const REFERENCE: usize = 120;
/// Slack of a CUSUM in sigma.
const SLACK: f64 = 0.5;
/// Threshold of a CUSUM in sigma: with independent noise, one false alarm in 89 days of one side.
const THRESHOLD: f64 = 14.0;
/// Minimum sigma: a different mix of loads moves the median by this much, because the law is not exact.
const MIN_SIGMA: f64 = 0.01;
/// Minimum shift of a drift.
const MIN_SHIFT: f64 = 0.05;
/// Weight of a bucket in the smoothed level.
const SMOOTHING: f64 = 0.1;

/// A lasting change in the step times of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// The kind.
    pub kind: StepKind,
    /// Step time relative to the reference.
    pub ratio: f64,
    /// Seconds with steps since the level moved.
    pub seconds: usize,
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, ratio, seconds } = self;
        write!(f, "{} steps take {ratio:.2} times as long as they did, for {seconds} s", kind.name())
    }
}

/// Drift detector for all kinds of steps.
#[derive(Debug, Default)]
pub(super) struct DriftWatch([Level; 3]);

/// Steps of one kind.
#[derive(Debug, Default)]
struct Level {
    /// Start of the bucket, and its values.
    bucket: (Duration, Vec<f64>),
    reference: Reference,
    slower: Cusum,
    faster: Cusum,
    /// Mean of the first reference, and the smoothed level; the metric compares them.
    first: Option<f64>,
    smoothed: f64,
    drifts: u64,
}

/// The reference level and its noise.
#[derive(Debug)]
enum Reference {
    /// Collecting the reference.
    Collecting(Vec<f64>),
    /// Mean and sigma.
    Known(f64, f64),
}

impl Default for Reference {
    fn default() -> Self {
        Self::Collecting(Vec::new())
    }
}

/// A one-sided sum, and the values since it was zero.
#[derive(Debug, Default)]
struct Cusum {
    sum: f64,
    values: f64,
    count: usize,
}

impl Cusum {
    /// Adds `value`, in sigma; returns mean and number of the values since the sum was zero if it exceeds the
    /// threshold.
    fn add(&mut self, value: f64) -> Option<(f64, usize)> {
        self.sum += value - SLACK;
        if self.sum <= 0.0 {
            *self = Self::default();
            return None;
        }
        (self.values, self.count) = (self.values + value, self.count + 1);
        (self.sum > THRESHOLD).then(|| (self.values / self.count as f64, self.count))
    }
}

impl DriftWatch {
    /// Adds a step that ended `at` and took exp(`ratio`) times its predicted time.
    pub fn add_step(&mut self, load: &StepLoad, at: Duration, ratio: f64) -> Option<Drift> {
        let kind = load.kind();
        let level = &mut self.0[StepKind::ALL.iter().position(|other| *other == kind)?];
        let (began, values) = &mut level.bucket;
        let median = (at.saturating_sub(*began) >= BUCKET && values.len() >= MIN_STEPS).then(|| median(values));
        if values.is_empty() {
            *began = at;
        }
        if values.len() < MAX_STEPS {
            values.push(ratio);
        }
        let (shift, seconds) = level.add_bucket(median?)?;
        Some(Drift { kind, ratio: shift.exp(), seconds })
    }

    /// Smoothed step time of each kind relative to its first reference; 1 until that is known.
    pub fn ratios(&self) -> [f64; 3] {
        std::array::from_fn(|i| self.0[i].first.map_or(1.0, |first| (self.0[i].smoothed - first).exp()))
    }

    /// Drifts of each kind so far.
    pub fn drifts(&self) -> [u64; 3] {
        std::array::from_fn(|i| self.0[i].drifts)
    }
}

/// Returns the median of the values and clears them.
fn median(values: &mut Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    let median = *values.select_nth_unstable_by(middle, f64::total_cmp).1;
    values.clear();
    median
}

impl Level {
    /// Adds one bucket; returns shift and seconds of a drift.
    fn add_bucket(&mut self, value: f64) -> Option<(f64, usize)> {
        let (mean, sigma) = match &mut self.reference {
            Reference::Known(mean, sigma) => (*mean, *sigma),
            Reference::Collecting(values) => {
                values.push(value);
                if values.len() == REFERENCE {
                    let (mean, sigma) = moments(values);
                    if self.first.is_none() {
                        (self.first, self.smoothed) = (Some(mean), mean);
                    }
                    self.reference = Reference::Known(mean, sigma.max(MIN_SIGMA));
                }
                return None;
            }
        };
        self.smoothed += SMOOTHING * (value - self.smoothed);
        let deviation = (value - mean) / sigma;
        let (slower, faster) = (self.slower.add(deviation), self.faster.add(-deviation));
        let (shift, seconds) = slower.or(faster.map(|(shift, seconds)| (-shift, seconds)))?;
        (self.slower, self.faster) = Default::default();
        if (shift * sigma).abs() < MIN_SHIFT {
            return None;
        }
        self.reference = Reference::default();
        self.drifts += 1;
        Some((shift * sigma, seconds))
    }
}

fn moments(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64;
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    const LOAD: StepLoad = StepLoad { decode_rows: 1, decode_kv: 10, prefill_rows: 0, prefill_tokens: 0, pairs: 0 };

    /// Normal noise: the sum of twelve uniform numbers.
    fn noise(seed: u64, i: u64) -> f64 {
        let uniform = |j: u64| rng::bits(seed, 12 * i + j) as f64 / u64::MAX as f64;
        (0..12).map(uniform).sum::<f64>() - 6.0
    }

    /// Seconds until a drift is reported after the level moves by `shift`, with noise of `sigma`.
    fn delay(seed: u64, sigma: f64, shift: f64) -> Option<(usize, f64)> {
        let mut level = Level::default();
        for i in 0..1000 {
            assert_eq!(level.add_bucket(0.3 + sigma * noise(seed, i)), None, "second {i}");
        }
        (0..600).find_map(|i| {
            level.add_bucket(0.3 + shift + sigma * noise(seed + 1, i as u64)).map(|(shift, _)| (i + 1, shift))
        })
    }

    #[test]
    fn noise_is_no_drift_in_thirty_days() {
        for (seed, sigma, correlation) in [(1, 0.005, 0.0), (2, 0.01, 0.5), (3, 0.03, 0.0)] {
            let (mut level, mut value) = (Level::default(), 0.0);
            for i in 0..30 * 86_400 {
                value = correlation * value + f64::sqrt(1.0 - correlation * correlation) * sigma * noise(seed, i);
                assert_eq!(level.add_bucket(-0.05 + value), None, "sigma {sigma}, second {i}");
            }
        }
    }

    #[test]
    fn drifts_are_found_within_seconds_and_small_ones_are_not_reported() {
        for seed in [10, 20, 30, 40] {
            for (sigma, shift, most) in [(0.01, 0.08, 6), (0.02, 0.08, 12), (0.03, 0.10, 15)] {
                for shift in [shift, -shift] {
                    let (seconds, found) = delay(seed, sigma, shift).unwrap();
                    assert!(seconds <= most, "{seconds} s for {shift} in {sigma}");
                    assert!((found / shift - 1.0).abs() < 0.35, "{found}, not {shift}");
                }
            }
            assert_eq!(delay(seed, 0.01, 0.02), None, "2 % are another mix of loads");
        }
    }

    #[test]
    fn a_drift_is_reported_once_and_the_ratio_stays() {
        let mut watch = DriftWatch::default();
        let mut found = Vec::new();
        // 50 steps a second for 10 minutes, 20 % slower in the last 5; one step in 20 takes three times as long.
        for i in 0..30_000u64 {
            let level = if i < 15_000 { 0.0 } else { 1.2_f64.ln() };
            let outlier = if i % 20 == 0 { 3.0_f64.ln() } else { 0.0 };
            let at = Duration::from_millis(20 * i);
            found.extend(watch.add_step(&LOAD, at, level + outlier + 0.01 * noise(7, i)).map(|drift| (at, drift)));
        }
        let [(at, drift)] = found[..] else { panic!("{found:?}") };
        assert!((300..306).contains(&at.as_secs()), "{at:?}");
        assert!((drift.ratio - 1.2).abs() < 0.02 && drift.kind == StepKind::Decode, "{drift:?}");
        assert!(drift.to_string().starts_with("decode steps take 1.20 times as long as they did, for "), "{drift}");
        let [decode, prefill, _] = watch.ratios();
        assert!((decode - 1.2).abs() < 0.01 && prefill == 1.0, "{decode}");
        assert_eq!(watch.drifts(), [1, 0, 0]);
    }
}

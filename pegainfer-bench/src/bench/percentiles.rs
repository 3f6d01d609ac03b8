//! Percentiles of times, for up to millions of inter-token latencies.

use serde::Serialize;
use std::time::Duration;

/// A time in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Percentiles in milliseconds, by linear interpolation between the closest ranks; NaN (null in JSON) without
/// measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Percentiles of these times.
    pub fn new(mut values: Vec<f64>) -> Self {
        // A long run has many values. Each percentile is selected only among the values above the previous one.
        let mut below = 0;
        Self::at(values.len(), |rank| {
            let (_, &mut a, above) = values[below..].select_nth_unstable_by(rank - below, f64::total_cmp);
            below = rank;
            (a, above.iter().copied().min_by(f64::total_cmp).unwrap_or(a))
        })
    }

    /// Percentiles of `len` values. `neighbours` returns the values of a rank and of the next one; it is called in
    /// ascending order.
    fn at(len: usize, mut neighbours: impl FnMut(usize) -> (f64, f64)) -> Self {
        let mut at = |percent: f64| {
            if len == 0 {
                return f64::NAN;
            }
            let rank = percent / 100.0 * (len - 1) as f64;
            let (a, b) = neighbours(rank.floor() as usize);
            a + (b - a) * rank.fract()
        };
        Self { p50: at(50.0), p90: at(90.0), p99: at(99.0) }
    }
}

/// Times between tokens. Equal neighbours share an entry: all sequences of a simulated step wait equally long.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gaps(Vec<(Duration, usize)>);

impl Gaps {
    /// Adds a time.
    #[inline]
    pub fn add(&mut self, gap: Duration) {
        match self.0.last_mut() {
            Some((last, count)) if *last == gap => *count += 1,
            _ => self.0.push((gap, 1)),
        }
    }

    /// The times in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = Duration> {
        self.0.iter().flat_map(|(gap, count)| std::iter::repeat_n(*gap, *count))
    }

    /// Their percentiles in milliseconds.
    pub fn percentiles(&self) -> Percentiles {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let mut ends: Vec<usize> = Vec::with_capacity(sorted.len());
        sorted.iter().for_each(|(_, count)| ends.push(ends.last().unwrap_or(&0) + count));
        let len = ends.last().copied().unwrap_or(0);
        let value = |rank: usize| milliseconds(sorted[ends.partition_point(|end| *end <= rank)].0);
        Percentiles::at(len, |rank| (value(rank), value((rank + 1).min(len - 1))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        let values = Percentiles::new(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!(values.p50, 2.5);
        assert!((values.p90 - 3.7).abs() < 1e-9 && (values.p99 - 3.97).abs() < 1e-9, "{values:?}");
        assert!(Percentiles::new(vec![]).p50.is_nan());
        assert_eq!(Percentiles::new(vec![7.0]).p99, 7.0);
    }

    #[test]
    fn percentiles_of_gaps_are_those_of_their_values() {
        let values = [3, 3, 1, 1, 1, 2, 9, 9, 9, 9, 4, 3, 3];
        let mut gaps = Gaps::default();
        values.iter().for_each(|ms| gaps.add(Duration::from_millis(*ms)));
        assert_eq!(gaps.0.len(), 6);
        assert!(gaps.iter().eq(values.map(Duration::from_millis)));
        assert_eq!(gaps.percentiles(), Percentiles::new(values.map(|ms| ms as f64).into()));
        assert!(Gaps::default().percentiles().p50.is_nan());
    }
}
